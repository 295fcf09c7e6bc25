"""Hosts of the experts over a run: from ``placement`` events, and from ``expert`` events that change them.

The cost of a row is the size of its expert: rows × size is work, and work over a host's speed is
time. The unit of time is arbitrary, since times are only compared with each other. The mean time is
all work over all speed: the time if all hosts finished together. The copies of an expert share its
rows, equally unless the events say otherwise.

An expert with an unknown host counts for no host, and speeds count as equal unless all of them are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from orchestrator.record.events.kinds import Event, ExpertChange, PlacedHost, PlacedLayer, Placement, Start
from orchestrator.record.experts.expert_changes import recorded_sizes
from orchestrator.strategies import recorded_strategy

Rows = Sequence[Mapping[int, float]]
"""Counts by layer and expert id."""
Wait = tuple[float, float]
"""Time of the slowest host and mean time."""
Copies = tuple[tuple[int, ...], tuple[float, ...]]
"""Hosts of an expert's copies, and the fraction of its rows that each gets."""
Sizes = Mapping[tuple[int, int], float]
"""Sizes by layer and expert id."""


@dataclass(frozen=True)
class RecordedHost(PlacedHost):
    """A host whose rank is known: without one in the event it is the place in the list."""

    rank: int = 0


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


def recorded_placement(event: Placement) -> RecordedPlacement | None:
    """Return the placement of an event; None if it names no host."""
    if not event.hosts:
        return None
    hosts = tuple(
        RecordedHost(**vars(host) | {"rank": index if host.rank is None else host.rank})
        for index, host in enumerate(event.hosts)
    )
    step = event.step or 0
    return RecordedPlacement(
        step=step,
        hosts=hosts,
        layers=tuple(_recorded_layer(layer, hosts) for layer in event.layers),
        method=event.method,
        sentence=event.sentence,
        placed_step=step,
    )


def placement_spans(events: Sequence[Event]) -> list[Span]:
    """Return the placements of a run in order of steps.

    A placement written after a restart removes those of later steps, which belonged to steps that
    are repeated. An ``expert`` event continues the placement before it with other experts or hosts.
    """
    spans: list[Span] = []
    # Only a run on expert hosts needs the sizes, and a long one has many graphs.
    sizes = recorded_sizes(events) if any(isinstance(event, Placement) for event in events) else {}
    before_change: dict[int, RecordedPlacement] = {}
    for event in events:
        step = event.step or 0
        current = spans[-1][1] if spans else None
        if isinstance(event, Placement) and (placement := recorded_placement(event)) is not None:
            spans = _replaced(spans, step, placement)
        elif isinstance(event, Start) and not _may_divide_experts(event.strategy):
            spans = _replaced(spans, step, None)
        elif isinstance(event, ExpertChange) and current is not None:
            undo = before_change.pop(event.layer, None) if event.change == "undone" else None
            before_change[event.layer] = current
            spans = _replaced(spans, step, undo or _changed(current, event, sizes))
    return spans


def _may_divide_experts(strategy: str | None) -> bool:
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
        _copies(ranks, split, placement.hosts) for ranks, split in zip(change.hosts, splits, strict=True)
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
    if change.change in ("born", "merged"):
        for expert in change.ids:
            rows[expert] = (copies_of.get(expert, ((), ())), _new_cost(layer, change, expert, sizes))
    else:
        for expert in set(copies_of) & set(rows):
            rows[expert] = (copies_of[expert], rows[expert][1])
    removed = {"merged": change.parents, "pruned": change.ids}.get(change.change, ())
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


def _recorded_layer(layer: PlacedLayer, hosts: Sequence[RecordedHost]) -> RecordedLayer:
    num_experts = len(layer.host_of)
    splits = [*layer.splits, *[()] * (num_experts - len(layer.splits))]
    copies = [_copies(ranks, split, hosts) for ranks, split in zip(layer.host_of, splits, strict=False)]
    work = _positive(layer.costs, num_experts)
    row_costs = _positive(layer.sizes, num_experts) or work or (1.0,) * num_experts
    predicted_times = layer.seconds
    if len(predicted_times) != len(hosts) or not any(predicted_times):
        # Without seconds the predicted work is the prediction, and without that the size of the
        # experts.
        host_work = [0.0] * len(hosts)
        for (held, shares), expert_work in zip(copies, work or row_costs, strict=True):
            for host, share in zip(held, shares, strict=True):
                host_work[host] += expert_work * share
        predicted_times = tuple(each / speed for each, speed in zip(host_work, _speeds(hosts), strict=True))
    return RecordedLayer(
        name=layer.name,
        ids=layer.ids if len(set(layer.ids)) == num_experts else tuple(range(num_experts)),
        hosts=tuple(held for held, _ in copies),
        shares=tuple(shares for _, shares in copies),
        row_costs=row_costs,
        predicted_times=predicted_times,
    )


def _copies(ranks: Sequence[int | None], split: Sequence[float], hosts: Sequence[RecordedHost]) -> Copies:
    """Return the known hosts of an expert's copies, with equal shares unless the split is whole."""
    index_of_rank = {host.rank: index for index, host in enumerate(hosts)}
    is_whole = len(split) == len(ranks) and sum(split) > 0
    parts = split if is_whole else [1.0] * len(ranks)
    share_of = {
        index_of_rank[rank]: part / sum(parts)
        for rank, part in zip(ranks, parts, strict=True)
        if rank is not None and rank in index_of_rank
    }
    return tuple(sorted(share_of)), tuple(share_of[host] for host in sorted(share_of))


def _positive(values: Sequence[float], num_experts: int) -> tuple[float, ...] | None:
    """Return a positive number for each expert; None unless all are known: known and guessed sizes
    do not compare."""
    return tuple(values) if num_experts and len(values) == num_experts and all(values) else None


def _speeds(hosts: Sequence[RecordedHost]) -> tuple[float, ...]:
    known = tuple(host.speed for host in hosts if host.speed)
    return known if len(known) == len(hosts) else (1.0,) * len(hosts)
