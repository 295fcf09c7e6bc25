"""Balance of expert-parallel hosts: the work that the counted rows meant for each host.

The cost of a row is the size of its expert: rows × size is work, and work over a host's speed is
time. The unit of time is arbitrary, since times are only compared with each other. The mean time is
all work over all speed: the time if all hosts finished together. Hosts wait for the slowest one in
every layer. So over several layers the imbalance is the sum of the slowest times over the sum of
the mean times: how much longer the experts took than on hosts that are always equally busy.

The events may have any shape: an expert with an unknown host counts for no host, and speeds count
as equal unless all of them are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestrator.record.events import Event
from orchestrator.record.scalars import to_float

MAX_MEASUREMENT = 1e100
"""Larger numbers are no measurements, and their products would overflow."""

Rows = Sequence[Sequence[float]]
"""Counts by layer and expert."""
Wait = tuple[float, float]
"""Time of the slowest host and mean time."""


@dataclass(frozen=True)
class RecordedHost:
    """A host as a placement event describes it."""

    rank: int
    node: str = ""
    device: str = ""
    name: str = ""
    speed: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class RecordedLayer:
    """Hosts of a layer's experts. A host is given by its index in the placement's list of hosts."""

    name: str
    host_of: tuple[int | None, ...]
    """The host of each expert; None if the placement lists no such host."""
    experts_by_host: tuple[tuple[int, ...], ...]
    row_costs: tuple[float, ...]
    """Cost of a row by expert: the expert's size, or its predicted work if sizes are missing."""
    predicted_times: tuple[float, ...]
    """Time by host that the placement predicted."""

    @property
    def num_experts(self) -> int:
        return len(self.host_of)

    def work(self, rows: Sequence[float]) -> list[float]:
        """Return rows × cost by host; rows of experts that the placement does not know count for no host."""
        num_counted = len(rows)
        return [
            sum(rows[expert] * self.row_costs[expert] for expert in experts if expert < num_counted)
            for experts in self.experts_by_host
        ]

    def unplaced_rows(self, rows: Sequence[float]) -> float:
        """Return the number of rows of experts without a known host."""
        return sum(
            count
            for expert, count in enumerate(rows)
            if expert >= self.num_experts or self.host_of[expert] is None
        )


@dataclass(frozen=True)
class RecordedPlacement:
    """The hosts of all experts from a step on, as a placement event describes them."""

    step: int
    hosts: tuple[RecordedHost, ...]
    layers: tuple[RecordedLayer, ...]
    method: str = ""
    sentence: str = ""

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Speeds by host; equal unless all are known."""
        return _speeds(self.hosts)

    def work(self, rows: Rows) -> list[list[float]]:
        """Return work by layer and host, for the layers that have both rows and a placement."""
        return [layer.work(layer_rows) for layer, layer_rows in zip(self.layers, rows, strict=False)]

    def times(self, rows: Rows) -> list[list[float]]:
        """Return times by layer and host: work over speed."""
        return [
            [work / speed for work, speed in zip(layer_work, self.speeds, strict=True)]
            for layer_work in self.work(rows)
        ]

    def mean(self, times: Sequence[float]) -> float:
        """Return the time if all hosts finished together: all work over all speed."""
        work = sum(time * speed for time, speed in zip(times, self.speeds, strict=True))
        return work / sum(self.speeds)

    def relative_times(self, times: Sequence[float]) -> list[float] | None:
        """Return each host's time as a multiple of the mean; None if there was no work."""
        mean = self.mean(times)
        return [time / mean for time in times] if mean else None

    def layer_waits(self, layers: Iterable[Sequence[float]]) -> list[Wait]:
        """Return the slowest and the mean time of each layer, given times by layer and host."""
        return [(max(times), self.mean(times)) for times in layers]


Span = tuple[int, RecordedPlacement | None]
"""The number of steps done when a placement took effect, and the placement; None without expert
parallelism."""


def parse_placement(event: Event) -> RecordedPlacement | None:
    """Return the placement of an event; None if it names no host."""
    hosts = tuple(
        _parse_host(index, host)
        for index, host in enumerate(_as_list(event.get("hosts")))
        if isinstance(host, Mapping)
    )
    if not hosts:
        return None
    layers = [layer if isinstance(layer, Mapping) else {} for layer in _as_list(event.get("layers"))]
    return RecordedPlacement(
        step=int(measurement(event.get("step")) or 0),
        hosts=hosts,
        layers=tuple(_parse_layer(layer, hosts) for layer in layers),
        method=str(event.get("method") or ""),
        sentence=str(event.get("sentence") or ""),
    )


def placement_spans(events: Iterable[Event]) -> list[Span]:
    """Return the placements of a run in order of steps.

    A placement written after a restart removes those of later steps, which belonged to steps that
    are repeated.
    """
    spans: list[Span] = []
    for event in events:
        placement = parse_placement(event) if event["event"] == "placement" else None
        has_other_strategy = event["event"] == "start" and event.get("strategy") not in (
            None,
            "expert_parallel",
        )
        if placement is not None or has_other_strategy:
            step = placement.step if placement is not None else int(measurement(event.get("step")) or 0)
            # A span at the same step is replaced: its placement never took effect.
            spans = [span for span in spans if span[0] < step] + [(step, placement)]
    return spans


def placement_at(spans: Sequence[Span], step: int) -> RecordedPlacement | None:
    """Return the placement that a step ran under: the newest before it, or the first one if none
    is before it."""
    before = [placement for since, placement in spans if since < step]
    if before:
        return before[-1]
    return spans[0][1] if spans else None


def settled_loads(
    events: Iterable[Event], loads: Iterable[Event]
) -> tuple[RecordedPlacement, list[Event]] | None:
    """Return the last placement and the second half of the load events counted under it.

    The second half shows how the gate settled, not how it began.
    """
    spans = placement_spans(events)
    placement = spans[-1][1] if spans else None
    if placement is None:
        return None
    counted = [event for event in loads if placement_at(spans, event["step"]) is placement]
    return placement, counted[len(counted) // 2 :]


def settled_imbalance(events: Iterable[Event], loads: Iterable[Event]) -> float | None:
    """Return the imbalance in summary and report: from the slowest hosts of each step, over the
    settled loads."""
    settled = settled_loads(events, loads)
    if settled is None:
        return None
    placement, recent = settled
    waits = [wait for event in recent for wait in placement.layer_waits(placement.times(token_counts(event)))]
    return imbalance(waits)


def imbalance(waits: Iterable[Wait]) -> float | None:
    """Return slowest over mean time, summed over consecutive waits; 1 is balanced, None if there
    was no work."""
    slowest, mean = (sum(column) for column in zip((0.0, 0.0), *waits, strict=True))
    return slowest / mean if mean else None


def sum_counts(rows_of_events: Iterable[Rows]) -> list[list[float]]:
    """Sum counts by layer and expert. Shapes may differ, since experts can be created during a run."""
    totals: list[list[float]] = []
    for rows in rows_of_events:
        totals += [[] for _ in range(len(rows) - len(totals))]
        for layer_totals, layer_rows in zip(totals, rows, strict=False):
            layer_totals += [0.0] * (len(layer_rows) - len(layer_totals))
            for expert, count in enumerate(layer_rows):
                layer_totals[expert] += count
    return totals


def token_counts(event: Event) -> list[list[float]]:
    """Return the counts of a load event by layer and expert; empty if it holds something else."""
    return [
        [measurement(count) or 0.0 for count in _as_list(layer)] for layer in _as_list(event.get("loads"))
    ]


def mean_per_step(events: Iterable[Event], name: str) -> float | None:
    """Return the mean of a per-step figure, weighted by each event's steps; None if no event has it."""
    weighted = [
        (value, measurement(event.get("steps")) or 1.0)
        for event in events
        if (value := measurement(event.get(name))) is not None
    ]
    num_steps = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / num_steps if num_steps else None


def measurement(value: Any) -> float | None:
    """Return the count or measurement in a field of an event; None for a value that cannot be one."""
    number = to_float(value)
    is_plausible = number is not None and math.isfinite(number) and 0 <= number < MAX_MEASUREMENT
    return number if is_plausible else None


def _parse_host(index: int, fields: Mapping[str, Any]) -> RecordedHost:
    rank = measurement(fields.get("rank"))
    return RecordedHost(
        rank=index if rank is None else int(rank),
        node=str(fields.get("node") or ""),
        device=str(fields.get("device") or ""),
        name=str(fields.get("name") or ""),
        speed=measurement(fields.get("speed")),
        memory=measurement(fields.get("memory")),
    )


def _parse_layer(fields: Mapping[str, Any], hosts: Sequence[RecordedHost]) -> RecordedLayer:
    index_of_rank = {host.rank: index for index, host in enumerate(hosts)}
    ranks = [measurement(rank) for rank in _as_list(fields.get("host_of"))]
    host_of = tuple(None if rank is None else index_of_rank.get(int(rank)) for rank in ranks)
    experts_by_host: list[list[int]] = [[] for _ in hosts]
    for expert, host in enumerate(host_of):
        if host is not None:
            experts_by_host[host].append(expert)
    work = _positive(fields.get("costs"), len(host_of))
    row_costs = _positive(fields.get("sizes"), len(host_of)) or work or (1.0,) * len(host_of)
    predicted_times = tuple(measurement(value) or 0.0 for value in _as_list(fields.get("seconds")))
    if len(predicted_times) != len(hosts) or not any(predicted_times):
        # Without seconds the predicted work is the prediction, and without that the size of the
        # experts.
        expert_work = work or row_costs
        host_work = [sum(expert_work[expert] for expert in experts) for experts in experts_by_host]
        predicted_times = tuple(each / speed for each, speed in zip(host_work, _speeds(hosts), strict=True))
    return RecordedLayer(
        name=str(fields.get("name") or ""),
        host_of=host_of,
        experts_by_host=tuple(map(tuple, experts_by_host)),
        row_costs=row_costs,
        predicted_times=predicted_times,
    )


def _positive(values: Any, count: int) -> tuple[float, ...] | None:
    """Return a positive number for each expert; None unless all are known: known and guessed sizes
    do not compare."""
    numbers = [measurement(value) for value in _as_list(values)]
    known = tuple(value for value in numbers if value)
    return known if count and len(known) == len(numbers) == count else None


def _speeds(hosts: Sequence[RecordedHost]) -> tuple[float, ...]:
    known = tuple(host.speed for host in hosts if host.speed)
    return known if len(known) == len(hosts) else (1.0,) * len(hosts)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
