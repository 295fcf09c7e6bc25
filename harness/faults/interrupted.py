"""Runs whose experts change, and which are interrupted.

A run continues from a checkpoint on another number of hosts, or it loses a host in a step or in a change
and goes back to its last snapshot. A run is a list of segments; each runs in processes of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

import experts.surgery.surgery as surgery_module
from experts.structure import LayerStructure
from harness.hosts.ranks import run_ranks
from harness.moe.evolving import Script, make_evolution, on_hosts
from harness.runs.host_runs import by_expert
from harness.runs.steppers import make_stepper, mean_loss
from harness.runs.tiny_model import Tiny
from harness.storage.snapshots import GENERATION, CopyingSink, HostResult, merge_all, merge_parts
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState, read_experts
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.stepper import Stepper

CPU = torch.device("cpu")
GLOBAL_BATCH = 12

Interruption = Literal["save", "resume", "lost in the step", "lost in the change"]


@dataclass(frozen=True)
class Segment:
    """The steps from one start of a run to its end or its next start."""

    hosts: int
    first: int
    """Steps that were done at its start."""
    last: int
    saves: tuple[int, ...] = ()
    """Steps after which the state is saved, as a snapshot and as a checkpoint."""
    lost: Literal["", "step", "change"] = ""
    """What the first of the hosts to be lost was doing after ``last`` - 1 steps; "" if none is lost."""
    lost_rank: int = 0


@dataclass(frozen=True)
class StepRecord:
    loss: float
    norm: float
    use: list[list[int]]
    epoch: int
    samples: list[float]
    """The samples of this host, each by its first feature."""


@dataclass
class SegmentResult:
    """A host's results of a segment."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    saved: dict[int, HostResult] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    moments: dict[str, Any] = field(default_factory=dict)


class HostLost(Exception):
    """The end of a host."""


def plan_segments(
    interruptions: Mapping[int, Interruption], hosts: Sequence[int], steps: int
) -> list[Segment]:
    """Cut a run into segments. ``hosts`` are the hosts of each; after the last one they stay the same."""
    segments: list[Segment] = []
    first = 0
    last_saved = 0
    saves: list[int] = []
    for step in range(1, steps + 1):
        interruption = interruptions.get(step) if step < steps else None
        if interruption in ("save", "resume"):
            saves.append(step)
            last_saved = step
        if interruption in (None, "save") and step < steps:
            continue
        size = hosts[min(len(segments), len(hosts) - 1)]
        segment = Segment(size, first, step, tuple(saves))
        if interruption == "lost in the step":
            segment = replace(segment, lost="step", lost_rank=step % size)
        elif interruption == "lost in the change":
            segment = replace(segment, lost="change", lost_rank=step % size)
        segments.append(segment)
        saves = []
        first = last_saved
    return segments


def run_interrupted(
    task: Tiny, script: Script, segments: Sequence[Segment], draw: random.Random
) -> list[list[SegmentResult]]:
    """Run all segments. Return the results by segment and host."""
    saved: dict[int, list[HostResult]] = {}
    results: list[list[SegmentResult]] = []
    was_lost = False
    for segment in segments:
        contents = _contents(saved.get(segment.first), from_snapshots=was_lost)
        layers = _placed(contents, task, segment.hosts, draw)
        job = (task, script, segment, contents, layers)
        hosts: list[SegmentResult] = run_ranks(run_segment, segment.hosts, *job)
        for step in segment.saves:
            saved[step] = [host.saved[step] for host in hosts]
        results.append(hosts)
        was_lost = bool(segment.lost)
    return results


def _contents(saved: Sequence[HostResult] | None, from_snapshots: bool) -> Contents | None:
    if saved is None:
        return None
    if from_snapshots:
        return merge_all([snapshot for snapshot, _ in saved])
    return merge_parts([part for _, part in saved])


def _placed(contents: Contents | None, task: Tiny, hosts: int, draw: random.Random) -> list[LayerStructure]:
    """Return the experts to start with: on the hosts where they were, or on other ones."""
    if contents is None:
        names = [f"blocks.{number}.ffn" for number in range(len(task.sizes))]
        pairs = zip(names, task.sizes, strict=True)
        layers = [LayerStructure.initial(name, sizes, [0] * len(sizes)) for name, sizes in pairs]
    else:
        saved = read_experts(contents.state)
        layers = list(saved.layers)
        if saved.hosts == hosts:
            return layers
    return [layer.on_hosts([draw.randrange(hosts) for _ in layer.experts]) for layer in layers]


def run_segment(
    rank: int,
    size: int,
    store: str,
    task: Tiny,
    script: Script,
    segment: Segment,
    contents: Contents | None,
    layers: Sequence[LayerStructure],
) -> SegmentResult:
    """Run a segment on one host, from a fresh start or from saved contents."""
    result = SegmentResult()
    group = process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) if size > 1 else None
    try:
        with group or nullcontext(World.single_process()) as world:
            _Host(task, script, segment, world, result).run(contents, layers)
            if segment.lost:
                raise HostLost  # the others are gone: they wait for nobody at the end
    except HostLost:
        pass
    except Exception as error:
        if not segment.lost or not is_communication_error(error):
            raise
    return result


class _Host:
    """One host of a segment."""

    def __init__(
        self, task: Tiny, script: Script, segment: Segment, world: World, result: SegmentResult
    ) -> None:
        self._task = task
        self._script = on_hosts(script, world.size)
        self._segment = segment
        self._world = world
        self._result = result
        self._is_lost = bool(segment.lost) and world.rank == segment.lost_rank

    def run(self, contents: Contents | None, layers: Sequence[LayerStructure]) -> None:
        # All hosts together compute up to 16 samples at once, so that each count of passes is tried.
        micro_batch = 16 if self._world.size == 1 else 4
        stepper, feed = make_stepper(
            self._task,
            micro_batch,
            GLOBAL_BATCH,
            learning_rate=1e-2,
            world=self._world,
            experts=layers if contents is not None else None,
            host_of=[[expert.hosts[0] for expert in layer.experts] for layer in layers],
        )
        evolution_state = EvolutionState()
        evolution = make_evolution(stepper, feed, self._script, evolution_state)
        state = TrainState(
            stepper.strategy.model, stepper.optimizer.inner, stepper.precision, evolution_state
        )
        progress = Progress() if contents is None else restore(contents, state)
        assert progress.step == self._segment.first
        evolution.start(progress)
        while progress.step < self._segment.last:
            for batch in feed.steps(progress.epoch, progress.position):
                self._step(stepper, batch, progress)
                self._lose_in_change(progress.step)
                evolution.after_step(progress)
                if progress.position == feed.num_samples:
                    progress.start_next_epoch()
                if progress.step in self._segment.saves:
                    evolution.flush()
                    self._result.saved[progress.step] = _save(state, progress, self._world)
                if progress.step == self._segment.last:
                    break
        self._result.weights = by_expert(state.model, dict(state.model.named_parameters()))
        optimizer = state.optimizer
        moments = {
            name: optimizer.state[parameter]["exp_avg_sq"]
            for name, parameter in state.model.named_parameters()
            if parameter in optimizer.state
        }
        self._result.moments = by_expert(state.model, moments)

    def _step(self, stepper: Stepper, batch: StepBatch, progress: Progress) -> None:
        """Do a step and record it, or be lost in it."""
        if self._is_lost and self._segment.lost == "step" and progress.step + 1 == self._segment.last:
            raise HostLost
        samples, batch = _seen(batch)
        totals = stepper.run(batch, progress.step)
        progress.step += 1
        progress.position += totals.samples
        progress.samples += totals.samples
        assert totals.norm is not None
        use = [load.tolist() for load in totals.loads]
        self._result.steps[progress.step] = StepRecord(
            mean_loss(totals), float(totals.norm), use, progress.epoch, samples
        )

    def _lose_in_change(self, step: int) -> None:
        """End this host between the decision on a change and its last message."""
        if self._is_lost and self._segment.lost == "change" and step == self._segment.last:

            def exchange_experts(*arguments: Any, **named: Any) -> Any:
                raise HostLost

            surgery_module.exchange_experts = exchange_experts


def _seen(batch: StepBatch) -> tuple[list[float], StepBatch]:
    """Return the samples of a batch that count, and the batch with its data."""
    samples: list[float] = []
    micro_batches = []
    for micro_batch in batch.micro_batches:
        data = micro_batch.fetch()
        if micro_batch.num_samples:
            samples += data[0][: micro_batch.num_samples, 0].tolist()
        micro_batches.append(replace(micro_batch, fetch=lambda data=data: data))
    return samples, replace(batch, micro_batches=micro_batches)


def _save(state: TrainState, progress: Progress, world: World) -> HostResult:
    """Take a snapshot and a checkpoint of the same step."""
    sink = CopyingSink()
    Snapshots(state, world, SnapshotTarget(sink, PinnedBuffers(CPU), GENERATION)).take(progress)
    return sink.snapshots[0], capture(state, progress, world, PinnedBuffers(CPU)).part
