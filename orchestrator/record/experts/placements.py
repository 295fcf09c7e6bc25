"""Hosts of the experts over a run: from ``placement`` events, and from ``expert`` events that change them.

The cost of a row is the size of its expert: rows × size is work, and work over a host's speed is
time. The unit of time is arbitrary, since times are only compared with each other. The mean time is
all work over all speed: the time if all hosts finished together. The copies of an expert share its
rows, equally unless the events say otherwise.

The events may have any shape: an expert with an unknown host counts for no host, and speeds count
as equal unless all of them are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from orchestrator.record.experts.expert_changes import ExpertChange, as_ids, parse_change
from orchestrator.record.experts.expert_graph import recorded_sizes
from orchestrator.record.files.events import Event, of_kind
from orchestrator.record.files.scalars import to_float
from orchestrator.strategies import recorded_strategy

MAX_MEASUREMENT = 1e100
"""Larger numbers are no measurements, and their products would overflow."""

Rows = Sequence[Mapping[int, float]]
"""Counts by layer and expert id."""
Wait = tuple[float, float]
"""Time of the slowest host and mean time."""
Copies = tuple[tuple[int, ...], tuple[float, ...]]
"""Hosts of an expert's copies, and the fraction of its rows that each gets."""
Sizes = Mapping[tuple[int, int], float]
"""Sizes by layer and expert id."""


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
    ids: tuple[int, ...]
    """The experts; the other fields have their order."""
    hosts: tuple[tuple[int, ...], ...]
    """The hosts of each expert's copies; empty if the placement lists no such host."""
    shares: tuple[tuple[float, ...], ...]
    """The fraction of its rows that each copy gets."""
    row_costs: tuple[float, ...]
    """Cost of a row by expert: the expert's size, or its predicted work if sizes are missing."""
    predicted_times: tuple[float, ...]
    """Time by host that the placement predicted; empty once the experts have changed."""

    @property
    def num_experts(self) -> int:
        return len(self.ids)

    @cached_property
    def cost_of(self) -> dict[int, float]:
        """Cost of a row by expert id."""
        return dict(zip(self.ids, self.row_costs, strict=True))

    @cached_property
    def hosts_of(self) -> dict[int, tuple[int, ...]]:
        """Hosts of the copies by expert id."""
        return dict(zip(self.ids, self.hosts, strict=True))

    def held_by(self, host: int) -> list[int]:
        """Return the ids of the experts that a host has a copy of."""
        return sorted(expert for expert, hosts in self.hosts_of.items() if host in hosts)

    def work(self, rows: Mapping[int, float], num_hosts: int) -> list[float]:
        """Return rows × cost by host; rows of experts that the placement does not know count for no host."""
        work = [0.0] * num_hosts
        for expert, cost, hosts, shares in zip(
            self.ids, self.row_costs, self.hosts, self.shares, strict=True
        ):
            for host, share in zip(hosts, shares, strict=True):
                work[host] += rows.get(expert, 0.0) * cost * share
        return work

    def unplaced_rows(self, rows: Mapping[int, float]) -> float:
        """Return the number of rows of experts without a known host."""
        return sum(count for expert, count in rows.items() if not self.hosts_of.get(expert))


@dataclass(frozen=True)
class RecordedPlacement:
    """The hosts of all experts from a step on."""

    step: int
    hosts: tuple[RecordedHost, ...]
    layers: tuple[RecordedLayer, ...]
    method: str = ""
    sentence: str = ""
    placed_step: int = 0
    """The step of the placement event. Changes of single experts since then are included."""

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Speeds by host; equal unless all are known."""
        return _speeds(self.hosts)

    def work(self, rows: Rows) -> list[list[float]]:
        """Return work by layer and host, for the layers that have both rows and a placement."""
        num_hosts = len(self.hosts)
        return [
            layer.work(layer_rows, num_hosts) for layer, layer_rows in zip(self.layers, rows, strict=False)
        ]

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
        mean = self.mean(times) if times else 0.0
        return [time / mean for time in times] if mean else None

    def layer_waits(self, layers: Iterable[Sequence[float]]) -> list[Wait]:
        """Return the slowest and the mean time of each layer, given times by layer and host."""
        return [(max(times), self.mean(times)) for times in layers]

    def unplaced_rows(self, rows: Rows) -> float:
        """Return the number of rows of experts and layers without a known host."""
        in_layers = sum(layer.unplaced_rows(row) for layer, row in zip(self.layers, rows, strict=False))
        return in_layers + sum(sum(row.values()) for row in rows[len(self.layers) :])


Span = tuple[int, RecordedPlacement | None]
"""The number of steps done when a placement took effect, and the placement; None without expert
parallelism."""


def parse_placement(event: Event) -> RecordedPlacement | None:
    """Return the placement of an event; None if it names no host."""
    hosts = tuple(
        _parse_host(index, host)
        for index, host in enumerate(as_list(event.get("hosts")))
        if isinstance(host, Mapping)
    )
    if not hosts:
        return None
    layers = [layer if isinstance(layer, Mapping) else {} for layer in as_list(event.get("layers"))]
    step = int(measurement(event.get("step")) or 0)
    return RecordedPlacement(
        step=step,
        hosts=hosts,
        layers=tuple(_parse_layer(layer, hosts) for layer in layers),
        method=str(event.get("method") or ""),
        sentence=str(event.get("sentence") or ""),
        placed_step=step,
    )


def placement_spans(events: Sequence[Event]) -> list[Span]:
    """Return the placements of a run in order of steps.

    A placement written after a restart removes those of later steps, which belonged to steps that
    are repeated. An ``expert`` event continues the placement before it with other experts or hosts.
    """
    spans: list[Span] = []
    # Only a run on expert hosts needs the sizes, and a long one has many graphs.
    sizes = recorded_sizes(events) if of_kind(events, "placement") else {}
    before_change: dict[int, RecordedPlacement] = {}
    for event in events:
        step = int(measurement(event.get("step")) or 0)
        current = spans[-1][1] if spans else None
        if event["event"] == "placement" and (placement := parse_placement(event)) is not None:
            spans = _replaced(spans, step, placement)
        elif event["event"] == "start" and not _may_divide_experts(event.get("strategy")):
            spans = _replaced(spans, step, None)
        elif event["event"] == "expert" and current is not None and (change := parse_change(event)):
            undo = before_change.pop(change.layer, None) if change.kind == "undone" else None
            before_change[change.layer] = current
            spans = _replaced(spans, step, undo or _changed(current, change, sizes))
    return spans


def _may_divide_experts(strategy: object) -> bool:
    """Return whether a recorded start may be of expert hosts: an early record has no strategy."""
    facts = recorded_strategy(strategy)
    return strategy is None or (facts is not None and facts.divides_experts)


def placement_at(spans: Sequence[Span], step: int) -> RecordedPlacement | None:
    """Return the placement that a step ran under: the newest before it, or the first one if none
    is before it."""
    before = [placement for since, placement in spans if since < step]
    if before:
        return before[-1]
    return spans[0][1] if spans else None


def measurement(value: Any) -> float | None:
    """Return the count or measurement in a field of an event; None for a value that cannot be one."""
    number = to_float(value)
    is_plausible = number is not None and math.isfinite(number) and 0 <= number < MAX_MEASUREMENT
    return number if is_plausible else None


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _replaced(spans: list[Span], step: int, placement: RecordedPlacement | None) -> list[Span]:
    """Return the spans with one more."""
    # A span at the same step is replaced: its placement never took effect.
    return [span for span in spans if span[0] < step] + [(step, placement)]


def _changed(placement: RecordedPlacement, change: ExpertChange, sizes: Sizes) -> RecordedPlacement:
    """Return a placement after a change of one layer's experts."""
    if change.layer >= len(placement.layers):
        return placement
    has_splits = len(change.splits) == len(change.hosts)
    splits = change.splits if has_splits else ((),) * len(change.hosts)
    copies = [
        _parse_copies(ranks, split, placement.hosts)
        for ranks, split in zip(change.hosts, splits, strict=True)
    ]
    layers = list(placement.layers)
    layers[change.layer] = _changed_layer(layers[change.layer], change, copies, sizes)
    method = f" ({placement.method})" if placement.method else ""
    return replace(
        placement,
        step=change.step,
        layers=tuple(layers),
        sentence=f"placed{method}, then changed, last at step {change.step}",
    )


def _changed_layer(
    layer: RecordedLayer, change: ExpertChange, copies: Sequence[Copies], sizes: Sizes
) -> RecordedLayer:
    old_copies = zip(layer.hosts, layer.shares, strict=True)
    rows = dict(zip(layer.ids, zip(old_copies, layer.row_costs, strict=True), strict=True))
    copies_of = dict(zip(change.ids, copies, strict=False))
    if change.kind in ("born", "merged"):
        for expert in change.ids:
            rows[expert] = (copies_of.get(expert, ((), ())), _new_cost(layer, change, expert, sizes))
    else:
        for expert in set(copies_of) & set(rows):
            rows[expert] = (copies_of[expert], rows[expert][1])
    removed = {"merged": change.parents, "pruned": change.ids}.get(change.kind, ())
    kept = {expert: row for expert, row in rows.items() if expert not in removed}
    return RecordedLayer(
        name=layer.name,
        ids=tuple(kept),
        hosts=tuple(hosts for (hosts, _), _ in kept.values()),
        shares=tuple(shares for (_, shares), _ in kept.values()),
        row_costs=tuple(cost for _, cost in kept.values()),
        predicted_times=(),
    )


def _new_cost(layer: RecordedLayer, change: ExpertChange, expert: int, sizes: Sizes) -> float:
    """Return the cost of a row of a new expert: by its recorded size, else that of its first parent, else
    the mean."""
    # Costs and sizes have other units: the experts that have both say how they compare.
    of_layer = {known: size for (index, known), size in sizes.items() if index == change.layer}
    both = [(cost, of_layer[known]) for known, cost in layer.cost_of.items() if known in of_layer]
    if expert in of_layer and both:
        return of_layer[expert] * sum(cost for cost, _ in both) / sum(size for _, size in both)
    inherited = [layer.cost_of[parent] for parent in change.parents if parent in layer.cost_of]
    costs = inherited[:1] or layer.row_costs or (1.0,)
    return sum(costs) / len(costs)


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
    ranks_of = [rank if isinstance(rank, list) else [rank] for rank in as_list(fields.get("host_of"))]
    splits = [as_list(split) for split in as_list(fields.get("splits"))]
    splits += [[]] * (len(ranks_of) - len(splits))
    copies = [_parse_copies(ranks, split, hosts) for ranks, split in zip(ranks_of, splits, strict=False)]
    num_experts = len(copies)
    work = _positive(fields.get("costs"), num_experts)
    row_costs = _positive(fields.get("sizes"), num_experts) or work or (1.0,) * num_experts
    predicted_times = tuple(measurement(value) or 0.0 for value in as_list(fields.get("seconds")))
    if len(predicted_times) != len(hosts) or not any(predicted_times):
        # Without seconds the predicted work is the prediction, and without that the size of the
        # experts.
        host_work = [0.0] * len(hosts)
        for (held, shares), expert_work in zip(copies, work or row_costs, strict=True):
            for host, share in zip(held, shares, strict=True):
                host_work[host] += expert_work * share
        predicted_times = tuple(each / speed for each, speed in zip(host_work, _speeds(hosts), strict=True))
    ids = as_ids(fields.get("ids"))
    return RecordedLayer(
        name=str(fields.get("name") or ""),
        ids=ids if len(set(ids)) == num_experts else tuple(range(num_experts)),
        hosts=tuple(held for held, _ in copies),
        shares=tuple(shares for _, shares in copies),
        row_costs=row_costs,
        predicted_times=predicted_times,
    )


def _parse_copies(ranks: Sequence[Any], split: Sequence[Any], hosts: Sequence[RecordedHost]) -> Copies:
    """Return the known hosts of an expert's copies, with equal shares unless the split is whole."""
    index_of_rank = {host.rank: index for index, host in enumerate(hosts)}
    parts = [measurement(part) or 0.0 for part in split]
    if len(parts) != len(ranks) or not sum(parts):
        parts = [1.0] * len(ranks)
    share_of: dict[int, float] = {}
    for rank, part in zip(ranks, parts, strict=True):
        number = measurement(rank)
        if number is not None and int(number) in index_of_rank:
            share_of[index_of_rank[int(number)]] = part / sum(parts)
    return tuple(sorted(share_of)), tuple(share_of[host] for host in sorted(share_of))


def _positive(values: Any, count: int) -> tuple[float, ...] | None:
    """Return a positive number for each expert; None unless all are known: known and guessed sizes
    do not compare."""
    numbers = [measurement(value) for value in as_list(values)]
    known = tuple(value for value in numbers if value)
    return known if count and len(known) == len(numbers) == count else None


def _speeds(hosts: Sequence[RecordedHost]) -> tuple[float, ...]:
    known = tuple(host.speed for host in hosts if host.speed)
    return known if len(known) == len(hosts) else (1.0,) * len(hosts)
