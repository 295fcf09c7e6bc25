"""Hosts of the experts and their balance: the figures that picture, page, text and verdict show of
a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.record.events.kinds import Load
from orchestrator.record.experts.host_balance import (
    Counts,
    even_ratios,
    imbalance,
    mean_per_step,
    num_tokens,
    settled_imbalance,
    settled_loads,
    token_counts,
)
from orchestrator.record.experts.placements import RecordedHost, RecordedLayer, RecordedPlacement
from orchestrator.record.summary.speed import after_warm_up
from orchestrator.report.run.figures.read import RunRecord, cached_on_record
from orchestrator.report.run.figures.stats import speed
from orchestrator.types import counted

HOST_MAX_LOG2 = 1.0
"""The colours of host use range from half to twice the mean: hosts should be balanced, experts need not."""
UNEVEN = 1.2
"""A host that takes this many times the mean time is worth attention."""
MAX_BARS = 24
"""Layers × hosts that are shown one by one; more become a map of hosts and layers."""
MAX_SEGMENTS = 600
"""Experts that are shown one by one."""
SPEEDS_DIFFER = 1.1
"""Ratio of the fastest to the slowest host from which speeds are shown."""


@dataclass(frozen=True)
class HostedLayer:
    """A layer's experts on their hosts. Times are multiples of the mean; None if they are unknown."""

    index: int
    placement: RecordedLayer
    use: dict[int, float | None]
    """Rows of each expert, by id, as a multiple of the even share."""
    measured: list[float] | None
    """Time by host."""
    predicted: list[float] | None
    """Time by host that the placement predicted; None once the experts have changed."""

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
    def shares(self) -> dict[int, float]:
        """Each expert's fraction of the layer's size, by id."""
        total = sum(self.placement.row_costs)
        return {expert: cost / total for expert, cost in self.placement.cost_of.items()}


@dataclass(frozen=True)
class HostLoad:
    """The placement at the end, and the second half of the loads since its placement event.

    The second half shows how the gate settled, not how it began. Rows of an expert that moved count
    for the host that it was on.
    """

    placement: RecordedPlacement
    layers: list[HostedLayer]
    steps: tuple[int, int] | None
    """First and last step of the measured figures; None if nothing was counted."""
    measured: list[float] | None
    """Time by host over all layers, as a multiple of the mean: the time if all hosts finished together."""
    predicted: list[float] | None
    work: list[float] | None
    """Each host's fraction of all rows × size."""
    slowest: float | None
    """Slowest over mean time, of each layer's slowest host over all these steps: as in cells and bars."""
    imbalance: float | None
    """Slowest over mean time, of each step's slowest hosts, for which the others wait: never
    smaller. As in summary.json.
    """
    predicted_imbalance: float | None
    unplaced: float
    """Fraction of the rows that went to experts without a known host."""

    @property
    def hosts(self) -> tuple[RecordedHost, ...]:
        return self.placement.hosts

    @cached_property
    def shows_experts(self) -> bool:
        """Whether each expert can be shown by itself."""
        num_experts = sum(layer.placement.num_experts for layer in self.layers)
        return len(self.layers) * len(self.hosts) <= MAX_BARS and num_experts <= MAX_SEGMENTS

    @cached_property
    def widest(self) -> float:
        """The largest fraction of a layer's size on one host: bars of experts are scaled to it."""
        widths = [
            sum(layer.shares[expert] for expert in layer.placement.held_by(host))
            for layer in self.layers
            for host in range(len(self.hosts))
        ]
        return max(widths, default=0.0) or 1.0

    @cached_property
    def longest(self) -> float:
        """The longest time that is shown: of a layer if experts are shown, else over all layers."""
        parts = self.layers if self.shows_experts else [self]
        times = [time for part in parts for time in (*(part.measured or ()), *(part.predicted or ()))]
        return max(times, default=UNEVEN)

    def label(self, index: int) -> str:
        return f"host {self.hosts[index].rank}"

    def relative_speed_text(self, index: int) -> str:
        """Return the host's speed relative to the slowest, 'speed 2×'; empty if all are alike."""
        slowest = min(self.placement.speeds)
        fastest = max(self.placement.speeds)
        if fastest <= SPEEDS_DIFFER * slowest:
            return ""
        return f"speed {self.placement.speeds[index] / slowest:.2g}×"


@dataclass(frozen=True)
class ExchangeCost:
    """The token exchange per step: bytes and rows to other hosts, and the mean host's waiting time."""

    bytes: float | None
    seconds: float | None
    rows: float | None
    share: float | None
    """Waiting time as a fraction of a step."""


@cached_on_record
def host_load(record: RunRecord) -> HostLoad | None:
    """Return the load under the last placement; None if there is none, or it names no layers."""
    settled = settled_loads(record.events, record.loads)
    if settled is None or not settled.placement.layers:
        return None
    placement = settled.placement
    counted = [(under, token_counts(event)) for under, event in settled.loads]
    num_rows = sum(num_tokens(rows) for _, rows in counted)
    times = _sum_by_layer([under.times(rows) for under, rows in counted])
    predicted = [layer.predicted_times for layer in placement.layers]
    is_predicted = all(predicted)
    work = _sum_by_host(_sum_by_layer([under.work(rows) for under, rows in counted]))
    unplaced = sum(under.unplaced_rows(rows) for under, rows in counted)
    return HostLoad(
        placement=placement,
        layers=_hosted_layers(placement, [rows for _, rows in counted], times),
        steps=_counted_steps([event for _, event in settled.loads]) if num_rows else None,
        measured=placement.relative_times(_sum_by_host(times)) if times else None,
        predicted=placement.relative_times(_sum_by_host(predicted)) if is_predicted else None,
        work=[host_work / sum(work) for host_work in work] if sum(work) else None,
        slowest=imbalance(placement.layer_waits(times)),
        imbalance=settled_imbalance(record.events, record.loads),
        predicted_imbalance=imbalance(placement.layer_waits(predicted)) if is_predicted else None,
        unplaced=unplaced / num_rows if num_rows else 0.0,
    )


def _hosted_layers(
    placement: RecordedPlacement, counted: list[Counts], times: list[list[float]]
) -> list[HostedLayer]:
    return [
        HostedLayer(
            index=index,
            placement=layer,
            use=_use(layer, [rows[index] for rows in counted if index < len(rows)]),
            measured=placement.relative_times(times[index]) if index < len(times) else None,
            predicted=placement.relative_times(layer.predicted_times),
        )
        for index, layer in enumerate(placement.layers)
    ]


def _use(layer: RecordedLayer, counted: list[dict[int, float]]) -> dict[int, float | None]:
    ratios = even_ratios(counted)
    return {expert: ratios.get(expert) for expert in layer.ids}


def _sum_by_layer(figures: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Sum figures by layer and host over events; an event may name fewer layers than another."""
    totals: list[list[float]] = []
    for layers in figures:
        for index, hosts in enumerate(layers):
            if index == len(totals):
                totals.append([0.0] * len(hosts))
            totals[index] = [total + figure for total, figure in zip(totals[index], hosts, strict=True)]
    return totals


def _sum_by_host(layers: Sequence[Sequence[float]]) -> list[float]:
    return [sum(host) for host in zip(*layers, strict=True)]


def _counted_steps(loads: Sequence[Load]) -> tuple[int, int]:
    """Return the first and the last step that load events speak of."""
    num_steps = int(loads[0].steps or 1)
    return max(1, loads[0].step - num_steps + 1), loads[-1].step


@cached_on_record
def exchange_cost(record: RunRecord) -> ExchangeCost | None:
    if not record.exchanges:
        return None
    exchanges = after_warm_up(record.exchanges)
    num_bytes, seconds, rows = (mean_per_step(exchanges, name) for name in ("bytes", "seconds", "rows"))
    if num_bytes is None and seconds is None and rows is None:
        return None
    measured = speed(record)
    share = seconds / measured.mean_step_s if seconds is not None and measured else None
    return ExchangeCost(num_bytes, seconds, rows, share)


def ids_text(ids: Sequence[int]) -> str:
    """Return expert ids in short: '0–3, 7'."""
    runs: list[list[int]] = []
    for index in ids:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(_run_text(first, last) for first, last in runs)


def _run_text(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}–{last}"


def slowest_text(measured: float | None, predicted: float | None, who: str = "slowest host") -> str:
    parts = []
    if measured is not None:
        parts.append(f"{who} {measured:.2f}× the mean")
    if predicted is not None:
        parts.append(f"predicted {predicted:.2f}×")
    return ", ".join(parts)


def steps_text(load: HostLoad) -> str:
    """Return the steps of the measured figures."""
    return f"steps {load.steps[0]} to {load.steps[1]}" if load.steps else "no load was counted"


def unplaced_text(load: HostLoad) -> str:
    """Return the part of the rows that the figures leave out; empty if they leave out none."""
    if not load.unplaced:
        return ""
    return f"{load.unplaced:.1%} of the rows went to experts without a known host"


def num_experts_text(load: HostLoad, index: int) -> str:
    """Return the number of experts on a host: '8 experts per layer', '6 to 10 experts per layer'."""
    counts = [len(layer.placement.held_by(index)) for layer in load.layers]
    if min(counts) == max(counts):
        return counted(counts[0], "expert") + " per layer"
    return f"{min(counts)} to {max(counts)} experts per layer"
