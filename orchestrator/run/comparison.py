"""Compares the recomputed steps of a run with its record: losses, norms, and digests of the state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import Rollbacks
from orchestrator.record.events.kinds import Digest, Step, decode_event
from orchestrator.record.files.reading import stream_events
from orchestrator.types import counted

_WORDS = 16
"""Hexadecimal digits of a tensor's digest."""
_EXPERT_WORDS = 8
_FIGURES = {"lr": "learning rate", "samples": "samples", "loss": "loss", "grad_norm": "gradient norm"}
"""The figures of a step that are compared, the causes before their effects."""
_KEPT = (Step, Digest, kinds.Start, kinds.Failure, kinds.Recovery, kinds.Settings)


@dataclass(frozen=True)
class RecordedSteps:
    """The steps of a run that count, their digests, and where its settings have changed."""

    steps: Mapping[int, Step]
    digests: Mapping[int, Digest]
    changes: tuple[tuple[int, tuple[str, ...]], ...]
    """The step after which a resume has changed settings, and the names of these settings."""
    device: str
    """As the newest start names it."""

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)


def read_recorded_steps(path: Path) -> RecordedSteps:
    """Read the record of a run, which may be running: nothing is written."""
    steps: dict[int, Step] = {}
    digests: dict[int, Digest] = {}
    changes: dict[int, tuple[str, ...]] = {}
    device = ""
    rollbacks = Rollbacks()
    names = {cls.EVENT for cls in _KEPT}
    for line in stream_events(path):
        event = decode_event(line) if line["event"] in names else None
        if event is None:
            continue
        limit = rollbacks.add(event)
        if limit is not None:
            for kept in (steps, digests):
                for step in [step for step in kept if step > limit]:
                    del kept[step]
        match event:
            case Step():
                steps[event.step] = event
            case Digest():
                digests[event.step] = event
            case kinds.Settings() if event.changes:
                changes[event.step or 0] = tuple(str(change.name) for change in event.changes)
            case kinds.Start() if event.device:
                device = event.device
    return RecordedSteps(steps, digests, tuple(sorted(changes.items())), device)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose digest differs from the recorded one."""

    name: str
    slot: str
    """"" for the weights, else the state of the optimizer."""
    recorded: str
    recomputed: str
    experts: tuple[int, ...] = ()
    """The ids of the experts of its layer that differ; empty for a tensor of the dense part."""

    @property
    def text(self) -> str:
        slot = "the weights" if not self.slot else f"{self.slot} of the optimizer"
        experts = ""
        if self.experts:
            first, *others = self.experts
            more = f" and {counted(len(others), 'other')}" if others else ""
            experts = f", expert {first}{more}"
        values = f"{self.recorded} recorded, {self.recomputed} recomputed"
        return f"{self.name}{experts} ({slot}): {values}"


@dataclass(frozen=True)
class Difference:
    """The first difference between the record and the recomputed steps."""

    step: int
    """The first step whose figures or state differ."""
    figure: str = ""
    """The figure of the step that differs: loss, gradient norm."""
    recorded: str = ""
    recomputed: str = ""
    digest_step: int | None = None
    """The first step whose digests differ; None if none was compared from the first differing step on."""
    equal_digest_step: int | None = None
    """The last step before it whose digests are equal."""
    tensors: tuple[TensorDifference, ...] = ()
    """The tensors that differ at this step, the first in the order of the record."""
    num_tensors: int = 0
    """Tensors that were compared there."""

    @property
    def lines(self) -> list[str]:
        lines = []
        if self.figure:
            values = f"{self.recorded} recorded, {self.recomputed} recomputed"
            lines.append(f"step {self.step}: {self.figure} {values}")
        if self.tensors:
            of_all = f"{len(self.tensors)} of {counted(self.num_tensors, 'tensor')} differ"
            lines.append(f"state after step {self.digest_step}: {self.tensors[0].text}; {of_all}")
            of_experts = [tensor for tensor in self.tensors if tensor.experts]
            if of_experts and of_experts[0] != self.tensors[0]:
                lines.append(f"the first of an expert: {of_experts[0].text}")
        before = self.equal_digest_step
        if self.digest_step is not None and before is not None and self.digest_step - before > 1:
            lines.append(
                f"the digests of step {before} are equal, and there are none until step {self.digest_step}: "
                "the first tensor may be another one; a run with --digest-every 1 names it"
            )
        elif self.digest_step is None:
            lines.append("no digests were recorded from this step on, so the tensor is unknown")
        return lines


def first_difference(
    recorded: RecordedSteps, steps: Mapping[int, Step], digests: Mapping[int, Digest]
) -> Difference | None:
    """Return the first difference of recomputed steps from the record; None if what both have is equal."""
    figure = _first_figure(recorded, steps)
    equal_digest_step: int | None = None
    for step in sorted(digests.keys() & recorded.digests.keys()):
        tensors = tensor_differences(recorded.digests[step], digests[step])
        if tensors:
            state = Difference(
                step,
                digest_step=step,
                equal_digest_step=equal_digest_step,
                tensors=tuple(tensors),
                num_tensors=_num_tensors(recorded.digests[step]),
            )
            if figure is None or figure.step > step:
                return state
            return replace(
                state,
                step=figure.step,
                figure=figure.figure,
                recorded=figure.recorded,
                recomputed=figure.recomputed,
            )
        equal_digest_step = step
    return figure


def _first_figure(recorded: RecordedSteps, steps: Mapping[int, Step]) -> Difference | None:
    """Return the first figure of a step that differs."""
    for step in sorted(steps.keys() & recorded.steps.keys()):
        for name, text in _FIGURES.items():
            then = getattr(recorded.steps[step], name)
            now = getattr(steps[step], name)
            if not _same(then, now):
                return Difference(step, text, repr(then), repr(now))
    return None


def _same(then: float | None, now: float | None) -> bool:
    """Return whether two figures have the same bits; nan is one figure."""
    if isinstance(then, float) and isinstance(now, float) and math.isnan(then):
        return math.isnan(now)
    return then == now


def _num_tensors(digest: Digest) -> int:
    return sum(len(text) // _WORDS for text in digest.tensors.values())


def tensor_differences(recorded: Digest, recomputed: Digest) -> list[TensorDifference]:
    """Return the tensors that differ, in the order of the record: weights, then the optimizer's state."""
    found: list[TensorDifference] = []
    slots = [*recorded.slots, *(slot for slot in recomputed.slots if slot not in recorded.slots)]
    names = [*recorded.tensors, *(name for name in recomputed.tensors if name not in recorded.tensors)]
    for slot in slots:
        for name in names:
            then = _of_slot(recorded, name, slot)
            now = _of_slot(recomputed, name, slot)
            if then != now:
                found.append(TensorDifference(name, slot, then, now, _experts(recorded, recomputed, name)))
    # Of a damaged line the tensors may be missing, and the sum over all is not.
    if not found and (recorded.weights, recorded.state) != (recomputed.weights, recomputed.state):
        found.append(TensorDifference("all tensors together", "", recorded.state, recomputed.state))
    return found


def _of_slot(digest: Digest, name: str, slot: str) -> str:
    if slot not in digest.slots:
        return "none"
    begin = digest.slots.index(slot) * _WORDS
    return digest.tensors.get(name, "")[begin : begin + _WORDS] or "none"


def _experts(recorded: Digest, recomputed: Digest, name: str) -> tuple[int, ...]:
    """Return the ids of the experts that differ in the layer of a tensor."""
    bank = name.rpartition(".")[0]
    then = _by_expert(recorded, bank)
    now = _by_expert(recomputed, bank)
    return tuple(expert for expert in sorted({*then, *now}) if then.get(expert) != now.get(expert))


def _by_expert(digest: Digest, bank: str) -> dict[int, str]:
    text = digest.experts.get(bank, "")
    words = [text[begin : begin + _EXPERT_WORDS] for begin in range(0, len(text), _EXPERT_WORDS)]
    ids = digest.ids.get(bank) or range(len(words))
    return dict(zip(ids, words, strict=False))
