"""The events of a run: one frozen dataclass for each kind, which its writers and readers share.

A line of ``events.jsonl`` has the kind as ``event``, and the fields of its class. Fields without a default
make the event: a line that lacks one, or is of no kind below, is skipped. Any other field that is missing
or damaged has its default. Times of events are unix seconds, those of steps and operations seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, dataclass_transform

from orchestrator.record.events.decoding import Count, Finite, Measure, count, decode, number

JsonEvent = dict[str, Any]
"""An event as a line of the record has it."""
ChangeKind = Literal["born", "warmed", "merged", "pruned", "moved", "copied", "undone"]


def _fraction(value: Any) -> float | None:
    return _bounded(value, 0.0)


def _correlation(value: Any) -> float | None:
    return _bounded(value, -1.0)


def _bounded(value: Any, low: float) -> float | None:
    known = number(value)
    # No comparison with nan holds.
    return None if known is None or known != known else min(1.0, max(low, known))


def _ranks(value: Any) -> tuple[int | None, ...]:
    """Return the ranks of an expert's hosts, of which early records have one."""
    return tuple(map(count, value if isinstance(value, list) else [value]))


KINDS: dict[str, type[Event]] = {}
"""The classes of events by kind."""


def _some_ids(value: Any) -> tuple[int | None, ...] | None:
    ids = tuple(map(count, value)) if isinstance(value, list) else ()
    return None if not ids or None in ids else ids


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have. A class below it with a ``kind`` is that of the lines of this kind."""

    EVENT: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        if kind:
            cls.EVENT = kind
            KINDS[kind] = cls

    time: Finite | None = None
    step: int | None = None
    """Steps done; of an event that changes something, when it takes effect."""


class StepEvent(Event):
    """An event about one step, or the steps before it. A restart at an earlier step discards it."""

    step: int = field()


class Start(Event, kind="start"):
    """Workers begin to train. A run that restarts them after a failure has several."""

    version: str | None = None
    task: str | None = None
    strategy: str | None = None
    workers: Count | None = None
    device: str | None = None
    precision: str | None = None
    global_batch_size: Count | None = None
    parameters: Count | None = None
    unit: str | None = None
    """What the loss is a mean over."""
    total_steps: Count | None = None
    best_by: str | None = None
    """The metric of the best evaluation and its direction: ``loss:min``."""
    build_seconds: Measure | None = None
    """To build or restore the state, once the workers have formed their group."""
    backend: str | None = None
    """Of several workers, like the next three."""
    sharding: str | None = None
    nodes: Count | None = None
    shares: tuple[Measure, ...] = ()
    """Fraction of the global batch by worker, where they differ."""
    gate: str | None = None
    """Of expert parallel: replicated, primary."""


@dataclass(frozen=True)
class PlacedHost:
    """A host of experts."""

    rank: Count | None = None
    node: str = ""
    device: str = ""
    name: str = ""
    speed: Measure | None = None
    """Measured FLOP/s."""
    memory: Measure | None = None


@dataclass(frozen=True)
class PlacedLayer:
    """The hosts of a layer's experts; the lists are by expert."""

    name: str = ""
    host_of: tuple[Annotated[tuple[int | None, ...], _ranks], ...] = ()
    """Ranks of the copies."""
    sizes: tuple[Measure, ...] = ()
    """Cost of a row."""
    costs: tuple[Measure, ...] = ()
    """Predicted work."""
    seconds: tuple[Measure, ...] = ()
    """Predicted, by host."""
    bound: Measure | None = None
    imbalance: Measure | None = None
    gap: Measure | None = None
    ids: tuple[Count, ...] = ()
    """Once the experts are not the initial ones, like the splits (see ``ExpertChange``)."""
    splits: tuple[tuple[Measure, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a line has them: the rank alone where no expert has copies."""
        if any(len(ranks) != 1 for ranks in self.host_of):
            return vars(self)
        return vars(self) | {"host_of": [rank for (rank,) in self.host_of]}


class Placement(Event, kind="placement"):
    method: str = ""
    """exact, lpt, round_robin, file."""
    hosts: tuple[PlacedHost, ...] = ()
    layers: tuple[PlacedLayer, ...] = ()
    sentence: str = ""
    """The placement for people."""


class Step(StepEvent, kind="step"):
    """A step, from 1. One that is replayed after a restart is written again: its last line counts."""

    epoch: Count | None = None
    """From 0."""
    loss: float | None = None
    """Of the global batch; text in the record if it is not finite."""
    grad_norm: float | None = None
    lr: float | None = None
    samples: Measure | None = None
    units: Measure | None = None
    seconds: Measure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the batch."""
    warm_up: bool = False
    """Whether the step is one of the first of a process."""


class Phases(StepEvent, kind="phases"):
    """Seconds per step of each phase."""

    steps: Measure | None = None
    data: Measure | None = None
    forward: Measure | None = None
    backward: Measure | None = None
    communication: Measure | None = None
    """Of several workers."""
    optimizer: Measure | None = None
    graph: Measure | None = None
    """Of a step that a CUDA graph repeats."""
    total: Measure | None = None
    warm_up: bool = False


class Exchange(StepEvent, kind="exchange"):
    """The token exchange between hosts, per step."""

    steps: Measure | None = None
    bytes: Measure | None = None
    """Sent to other hosts, summed over the hosts, like the rows."""
    seconds: Measure | None = None
    """Waiting time, mean over the hosts."""
    rows: Measure | None = None
    warm_up: bool = False


class Digest(StepEvent, kind="digest"):
    """Digests of the weights and the optimizer's state after a step, in hexadecimal digits. Two runs with the
    same digests have the same bits."""

    weights: str = field()
    """Of all weights, in 16 digits."""
    state: str = ""
    """Of the weights and the optimizer's state."""
    slots: tuple[str, ...] = ()
    """The tensors of a parameter: the weights ("") and the state of the optimizer."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """By parameter, 16 digits for each slot. Those of a role of a layer's experts are the sum over them."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """By the bank of a layer, 8 digits for each expert: the sum over all of its tensors."""
    ids: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    """Of the experts, once they are not the initial ones."""


class Load(StepEvent, kind="load"):
    """Tokens of each expert, summed over some steps."""

    steps: Measure | None = None
    loads: tuple[tuple[Measure | None, ...], ...] = ()
    """By layer and expert."""
    ids: tuple[tuple[Count, ...], ...] = ()
    """Like the loads, once the experts are not the initial ones."""


class ExpertChange(StepEvent, kind="expert"):
    """A change of a layer's experts. ``undone`` follows on the change that it undoes, with the same ids."""

    change: ChangeKind = field()
    layer: Count = field()
    ids: Annotated[tuple[int, ...], _some_ids] = field()
    layer_name: str = ""
    parents: tuple[Count, ...] = ()
    hosts: tuple[tuple[Count, ...], ...] = ()
    """Ranks of each expert's copies after the change."""
    splits: tuple[tuple[Count, ...], ...] = ()
    """Shares of each expert's tokens that its copies get, as whole numbers; empty if they are equal."""
    reason: str = ""
    loss_before: float | None = None
    """Of the validation, like ``loss_after``; None if nobody measured it."""
    loss_after: float | None = None
    output_change: float | None = None
    """Relative change of the layer's output."""
    seconds: Measure | None = None
    experts: Count | None = None
    """Experts of the layer after the change."""

    def is_undone_by(self, other: ExpertChange) -> bool:
        changed = (self.layer, self.ids, self.parents)
        return other.change == "undone" and changed == (other.layer, other.ids, other.parents)


@dataclass(frozen=True)
class GraphExpert:
    """An expert as the graph describes it."""

    id: Count
    size: Measure | None = None
    share: Annotated[float, _fraction] = 0.0
    """Its part of the layer's choices since the last sleep."""
    hosts: tuple[Count, ...] = ()
    age: Count = 0
    """Steps since its birth."""
    parents: tuple[Count, ...] = ()
    warming: bool = False
    """Whether it still shares the tokens of its parent."""


class GraphPair(NamedTuple):
    """Two experts and how strongly they belong together."""

    first: Count
    second: Count
    value: Annotated[float, _correlation]


@dataclass(frozen=True)
class GraphLayer:
    layer: Count
    name: str = ""
    experts: tuple[GraphExpert, ...] = ()
    coactivation: tuple[GraphPair, ...] = ()
    """Share of the rarer one's tokens that also chose the other, 0 to 1; small ones are left out."""
    similarity: tuple[GraphPair, ...] = ()
    """-1 to 1."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(expert.id for expert in self.experts)


class ExpertGraph(StepEvent, kind="expert_graph"):
    """All layers' experts after a step."""

    epoch: Count = 0
    layers: tuple[GraphLayer, ...] = ()

    @property
    def shown_epoch(self) -> int:
        """The epoch from 1, as on the screen and in the names of the pictures."""
        return self.epoch + 1

    def layer(self, index: int) -> GraphLayer | None:
        return next((layer for layer in self.layers if layer.layer == index), None)


@dataclass(frozen=True)
class Memory:
    """A peak in bytes: of the device on a GPU, of the process on a CPU."""

    allocated: Measure
    reserved: Measure | None = None
    parts: Mapping[str, Measure] = field(default_factory=dict)
    """By the names of ``MEMORY_PARTS``, of the worker that used most."""
    worker: Count | None = None
    """That worker, where there are several."""


class Epoch(StepEvent, kind="epoch"):
    epoch: Count = field()
    seconds: Measure | None = None
    """Of its steps."""
    samples: Measure | None = None
    loss: float | None = None
    samples_per_second: Measure | None = None
    memory: Memory | None = None


class Evaluation(StepEvent, kind="evaluate"):
    epoch: Count | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    bad_samples: Count | None = None
    """Samples that ``--skip-bad`` left out, if any."""
    samples: Measure | None = None
    seconds: Measure | None = None
    best: bool | None = None
    """Whether it was the best so far."""


class BadSamples(StepEvent, kind="bad_samples"):
    """Samples that ``--skip-bad`` left out."""

    epoch: Count | None = None
    count: Count = field()


class Checkpoint(Event, kind="checkpoint"):
    path: str | None = None
    bytes: Measure | None = None
    seconds: Measure | None = None
    """Until it is safe on disk."""
    stall: Measure | None = None
    """The part of the seconds during which the loop was blocked; all of them if it is unknown."""


class Upload(Event, kind="upload"):
    """A checkpoint is in the remote folder. A thread uploads: this may precede ``checkpoint``."""

    step: int = field()
    path: str | None = None
    bytes: Measure | None = None
    seconds: Measure | None = None


@dataclass(frozen=True)
class HostSample:
    """Use of the machine (percent, bytes); its memory is counted within the limits of the container."""

    cpu_percent: Measure | None = None
    memory_used: Measure | None = None
    memory_total: Measure | None = None
    process_memory: Measure | None = None
    """Resident memory of this process."""


@dataclass(frozen=True)
class DeviceSample:
    """Use of one GPU: bytes, percent, degrees Celsius, watts. ``None`` if the driver gives no value."""

    index: Count = 0
    name: str | None = None
    memory_used: Measure | None = None
    memory_total: Measure | None = None
    process_memory: Measure | None = None
    utilization: Measure | None = None
    memory_utilization: Measure | None = None
    temperature: Measure | None = None
    power: Measure | None = None


class Monitor(StepEvent, kind="monitor"):
    """A reading of the main worker's machine."""

    host: HostSample = HostSample()
    devices: tuple[DeviceSample, ...] = ()


class OutOfMemory(Event, kind="oom"):
    micro_batch: Count | None = None
    next_micro_batch: Count | None = None
    where: str | None = None


class Compile(Event, kind="compile"):
    status: str = ""
    seconds: Measure | None = None
    detail: str = ""


class CudaGraph(Event, kind="cuda_graph"):
    status: str = ""
    """captured, failed, off."""
    seconds: Measure | None = None
    detail: str = ""


class SnapshotInterval(Event, kind="snapshot_interval"):
    every: Count | None = None
    reason: str = ""


class Warned(Event, kind="warning"):
    kind: str = ""
    message: str = ""


class Notice(Event, kind="notice"):
    """An operation that takes a while."""

    message: str = ""


@dataclass(frozen=True)
class SkippedCheckpoint:
    path: str | None = None
    reason: str | None = None


class Resume(Event, kind="resume"):
    """Workers continue from a saved state."""

    path: str | None = None
    skipped: tuple[SkippedCheckpoint, ...] = ()
    source: str | None = None
    """``memory`` without a checkpoint."""
    weights_only: bool = False


@dataclass(frozen=True)
class ChangedSetting:
    name: Any = None
    before: Any = None
    now: Any = None
    origin: Any = None


class Settings(Event, kind="settings"):
    """Differences from the earlier start of a resumed run."""

    changes: tuple[ChangedSetting, ...] = ()


class Failure(Event, kind="failure"):
    kind: str = ""
    message: str = ""
    rank: Count | None = None
    final: bool | None = None
    """Only a final failure ends the run."""


class Recovery(Event, kind="recovery"):
    """Training continues from ``step`` after a failure, or on other workers."""

    attempt: Count | None = None
    reason: str = ""
    workers_before: Count | None = None
    workers: Count | None = None
    expert_replicas_before: Count | None = None
    """Groups of hosts that hold every expert, with ``--expert-replicas``, like the next."""
    expert_replicas: Count | None = None
    lost_steps: Count | None = None
    source: str | None = None
    """memory, disk."""
    detect_seconds: Measure | None = None
    regroup_seconds: Measure | None = None
    restore_seconds: Measure | None = None
    replay_seconds: Measure | None = None
    """To repeat the lost steps."""
    total_seconds: Measure | None = None
    """From the failure until the first step after it is done."""


class Logged(StepEvent, kind="log"):
    """Numbers that a callback asked to log."""

    values: Mapping[str, float] = field(default_factory=dict)


class End(Event, kind="end"):
    """Training ended in this process."""

    status: str = field()
    """completed, stopped, failed."""
    reason: str = ""
    steps: Count | None = None
    seconds: Measure | None = None
    memory: Memory | None = None
    """The peak of the run."""


class Final(Event, kind="final"):
    """The step whose weights the model has in the end; after ``end``."""

    step: int = field()
    weights: str = field()
    """best, last."""
    reason: str = ""
    seconds: Measure | None = None
    """Of the whole run, by the process that the user started."""


class LeftOut(Event, kind="left_out"):
    """Stands for events that a long record leaves out, at their first or last time. No record has it."""

    num_steps: int = 0


def decode_event(content: JsonEvent) -> Event | None:
    """Return the event of a line; None if it is of no known kind, or lacks what makes it."""
    cls = KINDS.get(content["event"])
    return decode(cls, content) if cls is not None else None
