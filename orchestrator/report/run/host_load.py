"""Where the experts live and how evenly their hosts are used: what picture, page, text and verdict show of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.record.host_balance import (
    RecordedHost,
    RecordedLayer,
    RecordedPlacement,
    imbalance,
    mean_per_step,
    measurement,
    settled_imbalance,
    settled_loads,
    sum_counts,
    token_counts,
)
from orchestrator.report.run.read import RunRecord, remembered
from orchestrator.report.run.stats import phase_seconds, plural, throughput

HOST_DOUBLINGS = 1.0
"""Colours of host use reach from half to twice the mean: hosts shall be even, experts need not."""
UNEVEN = 1.2
"""A host that takes this much more time than the mean is worth a look."""
MAX_BARS = 24
MAX_SEGMENTS = 600
"""Layers × hosts and layers × experts that are shown one by one; more than that become a map of hosts and layers."""
SPEEDS_DIFFER = 1.1


@dataclass(frozen=True)
class LayerLoad:
    """A layer's experts on their hosts. Times are multiples of the mean host's, None where there is nothing to go by."""

    index: int
    placement: RecordedLayer
    use: list[float | None]
    """By expert: rows as a multiple of the even share."""
    measured: list[float] | None
    predicted: list[float] | None

    @property
    def slowest(self) -> float | None:
        return max(self.measured) if self.measured else None

    @property
    def predicted_imbalance(self) -> float | None:
        return max(self.predicted) if self.predicted else None

    @property
    def name(self) -> str:
        return self.placement.name

    @cached_property
    def shares(self) -> list[float]:
        """Each expert's part of the layer's size."""
        whole = sum(self.placement.row_costs)
        return [size / whole for size in self.placement.row_costs]


@dataclass(frozen=True)
class HostLoad:
    """The last placement, and the second half of what was counted under it: how the gate settled, not how it began."""

    placement: RecordedPlacement
    layers: list[LayerLoad]
    steps: tuple[int, int] | None
    """First and last step that the measured figures speak of; None where nothing was counted."""
    measured: list[float] | None
    """Time by host over all layers, as a multiple of the mean: the time in which all hosts together would have been done."""
    predicted: list[float] | None
    work: list[float] | None
    """Each host's share of all rows × size."""
    slowest: float | None
    """Over mean, of each layer's slowest host over all these steps: what cells and bars show."""
    imbalance: float | None
    """Likewise, of each step's slowest hosts, which the others wait for: never less. As summary.json has it."""
    predicted_imbalance: float | None
    unplaced: float
    """Share of the rows that went to experts whose host is not known."""

    @property
    def hosts(self) -> tuple[RecordedHost, ...]:
        return self.placement.hosts

    @cached_property
    def detailed(self) -> bool:
        """Whether each expert can be shown by itself."""
        experts = sum(layer.placement.num_experts for layer in self.layers)
        return len(self.layers) * len(self.hosts) <= MAX_BARS and experts <= MAX_SEGMENTS

    @cached_property
    def widest(self) -> float:
        """The largest part of a layer's size that one host holds: what bars of experts are scaled to."""
        held = [
            sum(layer.shares[expert] for expert in experts)
            for layer in self.layers
            for experts in layer.placement.experts_by_host
        ]
        return max(held, default=0.0) or 1.0

    @cached_property
    def longest(self) -> float:
        """The longest time that is shown: of a layer where each is shown by itself, else over all layers."""
        shown = self.layers if self.detailed else [self]
        return max(
            (time for part in shown for time in (*(part.measured or ()), *(part.predicted or ()))),
            default=UNEVEN,
        )

    def label(self, place: int) -> str:
        return f"host {self.hosts[place].rank}"

    def pace(self, place: int) -> str:
        """The host's speed against the slowest, where they differ: 'speed 2×'."""
        slowest, fastest = min(self.placement.speeds), max(self.placement.speeds)
        ratio = self.placement.speeds[place] / slowest
        return f"speed {ratio:.2g}×" if fastest > SPEEDS_DIFFER * slowest else ""


@dataclass(frozen=True)
class ExchangeCost:
    """Per step: bytes and rows that went to other hosts, and seconds that the mean host waited for them."""

    bytes: float | None
    seconds: float | None
    rows: float | None
    share: float | None
    """Of the time of a step."""


@remembered
def host_load(record: RunRecord) -> HostLoad | None:
    """The placement that the run ended with; None where there is none, or it names no layers."""
    placement, recent = settled_loads(record.events, record.loads) or (None, [])
    if placement is None or not placement.layers:
        return None
    rows = sum_counts(token_counts(event) for event in recent)
    work = [sum(layer) for layer in zip(*placement.work(rows), strict=True)]
    predicted = [layer.predicted_times for layer in placement.layers]
    told, counted = sum(map(sum, rows)), placement.times(rows)
    return HostLoad(
        placement=placement,
        layers=[
            LayerLoad(
                index=index,
                placement=layer,
                use=_use(rows[index] if index < len(rows) else [], layer.num_experts),
                measured=placement.relative_times(counted[index]) if index < len(counted) else None,
                predicted=placement.relative_times(layer.predicted_times),
            )
            for index, layer in enumerate(placement.layers)
        ],
        steps=(
            max(1, recent[0]["step"] - int(measurement(recent[0].get("steps")) or 1) + 1),
            recent[-1]["step"],
        )
        if told
        else None,
        measured=placement.relative_times([sum(host) for host in zip(*counted, strict=True)])
        if counted
        else None,
        predicted=placement.relative_times([sum(host) for host in zip(*predicted, strict=True)]),
        work=[host / sum(work) for host in work] if sum(work) else None,
        slowest=imbalance(placement.layer_waits(counted)),
        imbalance=settled_imbalance(record.events, record.loads),
        predicted_imbalance=imbalance(placement.layer_waits(predicted)),
        unplaced=_unplaced(placement, rows) / told if told else 0.0,
    )


@remembered
def exchange_cost(record: RunRecord) -> ExchangeCost | None:
    if not record.exchanges:
        return None
    sent, waited, rows = (mean_per_step(record.exchanges, name) for name in ("bytes", "seconds", "rows"))
    rate = throughput(record)
    step = sum(phase_seconds(record).values()) or (rate.step_s if rate else 0.0)
    if sent is None and waited is None and rows is None:
        return None
    return ExchangeCost(sent, waited, rows, waited / step if waited is not None and step else None)


def ids_text(ids: Sequence[int]) -> str:
    """Expert ids in short: '0–3, 7'."""
    runs: list[list[int]] = []
    for index in ids:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs)


def slowest_text(measured: float | None, predicted: float | None, who: str = "slowest host") -> str:
    told = [f"{who} {measured:.2f}× the mean"] if measured is not None else []
    told += [f"predicted {predicted:.2f}×"] if predicted is not None else []
    return ", ".join(told)


def span_text(found: HostLoad) -> str:
    """Where the measured figures come from."""
    return f"steps {found.steps[0]} to {found.steps[1]}" if found.steps else "no load was counted"


def lost_text(found: HostLoad) -> str:
    """What the figures leave out; empty where it is nothing."""
    return (
        f"{found.unplaced:.1%} of the rows went to experts whose host is not known" if found.unplaced else ""
    )


def held_text(found: HostLoad, place: int) -> str:
    """How many experts a host holds: '8 per layer', '6 to 10 per layer'."""
    many = sorted(len(layer.placement.experts_by_host[place]) for layer in found.layers)
    return (
        plural(many[0], "expert", "experts") + " per layer"
        if many[0] == many[-1]
        else f"{many[0]} to {many[-1]} experts per layer"
    )


def _use(rows: Sequence[float], experts: int) -> list[float | None]:
    even = sum(rows) / len(rows) if rows else 0.0
    return [rows[expert] / even if even and expert < len(rows) else None for expert in range(experts)]


def _unplaced(placement: RecordedPlacement, rows: Sequence[Sequence[float]]) -> float:
    known = sum(layer.unplaced_rows(row) for layer, row in zip(placement.layers, rows, strict=False))
    return known + sum(map(sum, rows[len(placement.layers) :]))
