"""How evenly the hosts of experts are used: what the counted rows came to on each host.

A row costs as much as its expert is large: rows × size is work, and work over a host's speed is time. The unit is arbitrary,
since times are only held against one another. The mean is all work over all speed: the time of hosts that are done together.
Hosts wait for the slowest in every layer, so over several layers the imbalance is the sum of the slowest times over the sum
of the mean ones: how much longer the experts took than on hosts that are always equally busy.

The events may be of any shape: an expert whose host is unknown counts for no host, speeds that are not all known count as equal.
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
"""Figures from here on are no measurements, and their products would overflow."""

Rows = Sequence[Sequence[float]]
"""[layer][expert]"""
Wait = tuple[float, float]
"""Time of the slowest host and of the mean one."""


@dataclass(frozen=True)
class RecordedHost:
    rank: int
    node: str = ""
    device: str = ""
    name: str = ""
    speed: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class RecordedLayer:
    """Where a layer's experts live. Hosts are told by their place in the placement's list."""

    name: str
    host_of: tuple[int | None, ...]
    """The host of each expert; None where the placement names none of its hosts."""
    held: tuple[tuple[int, ...], ...]
    """The experts of each host."""
    sizes: tuple[float, ...]
    """What a row costs, by expert: its size, or the predicted work where sizes are not told."""
    predicted: tuple[float, ...]
    """Time by host as the placement expected it."""

    @property
    def experts(self) -> int:
        return len(self.host_of)

    def work(self, rows: Sequence[float]) -> list[float]:
        """Rows × size by host. Rows of experts that the placement does not know are nobody's."""
        known = len(rows)
        return [
            sum(rows[expert] * self.sizes[expert] for expert in experts if expert < known)
            for experts in self.held
        ]

    def unplaced(self, rows: Sequence[float]) -> float:
        """Rows of experts whose host is not known."""
        return sum(
            count
            for expert, count in enumerate(rows)
            if expert >= self.experts or self.host_of[expert] is None
        )


@dataclass(frozen=True)
class RecordedPlacement:
    step: int
    hosts: tuple[RecordedHost, ...]
    layers: tuple[RecordedLayer, ...]
    method: str = ""
    sentence: str = ""

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """By host; equal where not all are known."""
        return _speeds(self.hosts)

    def work(self, rows: Rows) -> list[list[float]]:
        """[layer][host], of the layers that have both rows and a placement."""
        return [layer.work(counted) for layer, counted in zip(self.layers, rows, strict=False)]

    def times(self, rows: Rows) -> list[list[float]]:
        """[layer][host]: work over speed."""
        return [
            [done / speed for done, speed in zip(work, self.speeds, strict=True)] for work in self.work(rows)
        ]

    def mean(self, times: Sequence[float]) -> float:
        """The time of a host if all were done together: all work over all speed."""
        return sum(time * speed for time, speed in zip(times, self.speeds, strict=True)) / sum(self.speeds)

    def against_mean(self, times: Sequence[float]) -> list[float] | None:
        """Each host's time as a multiple of the mean; None where nothing was done."""
        mean = self.mean(times)
        return [time / mean for time in times] if mean else None

    def waits(self, layers: Iterable[Sequence[float]]) -> list[Wait]:
        """Of times by layer and host."""
        return [(max(times), self.mean(times)) for times in layers]


def parse_placement(event: Event) -> RecordedPlacement | None:
    """The placement that an event tells; None where it names no host."""
    told = enumerate(_list(event.get("hosts")))
    hosts = tuple(_host(place, host) for place, host in told if isinstance(host, Mapping))
    if not hosts:
        return None
    layers = _list(event.get("layers"))
    return RecordedPlacement(
        step=int(measurement(event.get("step")) or 0),
        hosts=hosts,
        layers=tuple(_layer(layer if isinstance(layer, Mapping) else {}, hosts) for layer in layers),
        method=str(event.get("method") or ""),
        sentence=str(event.get("sentence") or ""),
    )


def placement_spans(events: Iterable[Event]) -> list[tuple[int, RecordedPlacement | None]]:
    """(steps done when it began to hold, placement), in order of steps; None from where the experts have no hosts of their own.

    One that is told after a restart undoes those of later steps, which belong to steps that are done again.
    """
    spans: list[tuple[int, RecordedPlacement | None]] = []
    for event in events:
        found = parse_placement(event) if event["event"] == "placement" else None
        elsewhere = event["event"] == "start" and event.get("strategy") not in (None, "expert_parallel")
        if found is not None or elsewhere:
            step = found.step if found is not None else int(measurement(event.get("step")) or 0)
            spans = [span for span in spans if span[0] < step] + [(step, found)]
    return spans


def placement_at(spans: Sequence[tuple[int, RecordedPlacement | None]], step: int) -> RecordedPlacement | None:
    """The placement that a step was made under: the newest from before it, or the first where none is."""
    before = [placement for since, placement in spans if since < step]
    return before[-1] if before else spans[0][1] if spans else None


def settled_loads(events: Iterable[Event], loads: Iterable[Event]) -> tuple[RecordedPlacement, list[Event]] | None:
    """The last placement, and the second half of the loads that were counted under it: how the gate settled, not how it began."""
    spans = placement_spans(events)
    placement = spans[-1][1] if spans else None
    if placement is None:
        return None
    counted = [event for event in loads if placement_at(spans, event["step"]) is placement]
    return placement, counted[len(counted) // 2 :]


def settled_imbalance(events: Iterable[Event], loads: Iterable[Event]) -> float | None:
    """The imbalance that summary and report tell: of each step's slowest hosts, over what ``settled`` takes."""
    found = settled_loads(events, loads)
    if found is None:
        return None
    placement, recent = found
    return imbalance(wait for event in recent for wait in placement.waits(placement.times(token_counts(event))))


def imbalance(waits: Iterable[Wait]) -> float | None:
    """Slowest over mean of what was waited for one after the other; 1 is even, None where nothing was done."""
    slowest, mean = (sum(column) for column in zip((0.0, 0.0), *waits, strict=True))
    return slowest / mean if mean else None


def sum_counts(many: Iterable[Rows]) -> list[list[float]]:
    """Sum of counts by layer and expert. Shapes may differ: experts can be born while a run goes on."""
    sums: list[list[float]] = []
    for rows in many:
        sums += [[] for _ in range(len(rows) - len(sums))]
        for so_far, row in zip(sums, rows, strict=False):
            so_far += [0.0] * (len(row) - len(so_far))
            for place, value in enumerate(row):
                so_far[place] += value
    return sums


def token_counts(event: Event) -> list[list[float]]:
    """The rows of a load event by layer and expert; none where it holds something else."""
    return [[measurement(count) or 0.0 for count in _list(row)] for row in _list(event.get("loads"))]


def mean_per_step(events: Iterable[Event], name: str) -> float | None:
    """Mean of a figure that each event gives per step, over the steps it speaks for; None where no event has it."""
    known = [
        (value, measurement(event.get("steps")) or 1.0)
        for event in events
        if (value := measurement(event.get(name))) is not None
    ]
    steps = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / steps if steps else None


def measurement(value: Any) -> float | None:
    """A count or measure that an event holds; None for what cannot be one."""
    found = to_float(value)
    return found if found is not None and math.isfinite(found) and 0 <= found < MAX_MEASUREMENT else None


def _host(place: int, told: Mapping[str, Any]) -> RecordedHost:
    rank = measurement(told.get("rank"))
    texts = {name: str(told.get(name) or "") for name in ("node", "device", "name")}
    return RecordedHost(
        place if rank is None else int(rank),
        **texts,
        speed=measurement(told.get("speed")),
        memory=measurement(told.get("memory")),
    )


def _layer(told: Mapping[str, Any], hosts: Sequence[RecordedHost]) -> RecordedLayer:
    places = {host.rank: place for place, host in enumerate(hosts)}
    ranks = [measurement(rank) for rank in _list(told.get("host_of"))]
    host_of = tuple(None if rank is None else places.get(int(rank)) for rank in ranks)
    held: list[list[int]] = [[] for _ in hosts]
    for expert, host in enumerate(host_of):
        if host is not None:
            held[host].append(expert)
    work = _whole(told.get("costs"), len(host_of))
    sizes = _whole(told.get("sizes"), len(host_of)) or work or (1.0,) * len(host_of)
    predicted = tuple(measurement(value) or 0.0 for value in _list(told.get("seconds")))
    if len(predicted) != len(hosts) or not any(predicted):
        # Without seconds the prediction is the work itself: as large as the experts are, where even that is not told.
        expected = [sum((work or sizes)[expert] for expert in experts) for experts in held]
        predicted = tuple(each / speed for each, speed in zip(expected, _speeds(hosts), strict=True))
    return RecordedLayer(str(told.get("name") or ""), host_of, tuple(map(tuple, held)), sizes, predicted)


def _whole(values: Any, count: int) -> tuple[float, ...] | None:
    """A positive figure for each expert, or None: sizes of some and guesses for others would not compare."""
    found = [measurement(value) for value in _list(values)]
    known = tuple(value for value in found if value)
    return known if count and len(known) == len(found) == count else None


def _speeds(hosts: Sequence[RecordedHost]) -> tuple[float, ...]:
    known = tuple(host.speed for host in hosts if host.speed)
    return known if len(known) == len(hosts) else (1.0,) * len(hosts)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
