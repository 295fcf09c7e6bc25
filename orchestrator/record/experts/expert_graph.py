"""The graph of a run's experts, as ``expert_graph`` events record it.

The events may have any shape: experts without an id and pairs of unknown experts are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.record.experts.expert_changes import as_id, as_ids
from orchestrator.record.files.effective import effective_events
from orchestrator.record.files.events import Event, by_step, of_kind
from orchestrator.record.files.scalars import to_float

_KINDS = ("expert_graph", "start", "failure", "recovery")


@dataclass(frozen=True)
class GraphExpert:
    """An expert as the graph describes it."""

    id: int
    size: float | None
    share: float
    """Its part of the layer's choices since the last sleep."""
    hosts: tuple[int, ...]
    age: int
    """Steps since its birth."""
    parents: tuple[int, ...]
    warming: bool
    """Whether it still shares the tokens of its parent."""


@dataclass(frozen=True)
class GraphPair:
    """Two experts and how strongly they belong together."""

    first: int
    second: int
    value: float


@dataclass(frozen=True)
class GraphLayer:
    layer: int
    name: str
    experts: tuple[GraphExpert, ...]
    coactivation: tuple[GraphPair, ...]
    """Share of the rarer one's tokens that also chose the other, 0 to 1."""
    similarity: tuple[GraphPair, ...]
    """-1 to 1."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(expert.id for expert in self.experts)


@dataclass(frozen=True)
class ExpertGraph:
    """All layers' experts after a step."""

    step: int
    epoch: int
    """Counted from 1, as on the screen and in the names of the pictures; events count from 0."""
    layers: tuple[GraphLayer, ...]

    def layer(self, index: int) -> GraphLayer | None:
        return next((layer for layer in self.layers if layer.layer == index), None)


def expert_graphs(events: Iterable[Event]) -> list[ExpertGraph]:
    """Return the graphs of a run in order of steps, without those that a restart discarded."""
    relevant = [event for event in events if event["event"] in _KINDS]
    steps = [event for event in relevant if event["event"] != "expert_graph" or _step(event) is not None]
    return [parse_graph(event) for event in by_step(effective_events(steps), "expert_graph")]


def parse_graph(event: Event) -> ExpertGraph:
    """Return the graph of an event."""
    layers = [_parse_layer(fields) for fields in _mappings(event.get("layers"))]
    return ExpertGraph(
        step=_step(event) or 0,
        epoch=(as_id(event.get("epoch")) or 0) + 1,
        layers=tuple(layer for layer in layers if layer is not None),
    )


def recorded_sizes(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Return the sizes that the graphs of a run name, by layer and expert id."""
    graphs = of_kind(events, "expert_graph")
    layers = [fields for event in graphs for fields in _mappings(event.get("layers"))]
    sizes = {
        (as_id(fields.get("layer")), as_id(expert.get("id"))): _bounded(expert.get("size"), 0.0, math.inf)
        for fields in layers
        for expert in _mappings(fields.get("experts"))
    }
    return {
        (layer, expert): size
        for (layer, expert), size in sizes.items()
        if layer is not None and expert is not None and size
    }


def graph_of_epochs(graphs: Iterable[ExpertGraph]) -> dict[int, ExpertGraph]:
    """Return the last graph of each epoch."""
    return {graph.epoch: graph for graph in graphs}


def _parse_layer(fields: Mapping[str, Any]) -> GraphLayer | None:
    index = as_id(fields.get("layer"))
    parsed = [_parse_expert(expert) for expert in _mappings(fields.get("experts"))]
    by_id = {expert.id: expert for expert in parsed if expert is not None}
    if index is None or not by_id:
        return None
    return GraphLayer(
        layer=index,
        name=str(fields.get("name") or ""),
        experts=tuple(by_id.values()),
        coactivation=_parse_pairs(fields.get("coactivation"), by_id),
        similarity=_parse_pairs(fields.get("similarity"), by_id),
    )


def _parse_expert(fields: Mapping[str, Any]) -> GraphExpert | None:
    expert_id = as_id(fields.get("id"))
    if expert_id is None:
        return None
    return GraphExpert(
        id=expert_id,
        size=_bounded(fields.get("size"), 0.0, math.inf),
        share=_bounded(fields.get("share"), 0.0, 1.0) or 0.0,
        hosts=as_ids(fields.get("hosts")),
        age=as_id(fields.get("age")) or 0,
        parents=as_ids(fields.get("parents")),
        warming=fields.get("warming") is True,
    )


def _parse_pairs(pairs: Any, known: Mapping[int, GraphExpert]) -> tuple[GraphPair, ...]:
    parsed = [_parse_pair(pair, known) for pair in pairs] if isinstance(pairs, list) else []
    return tuple(pair for pair in parsed if pair is not None)


def _parse_pair(pair: Any, known: Mapping[int, GraphExpert]) -> GraphPair | None:
    if not isinstance(pair, list) or len(pair) != 3:
        return None
    first = as_id(pair[0])
    second = as_id(pair[1])
    value = _bounded(pair[2], -1.0, 1.0)
    if first is None or second is None or value is None:
        return None
    is_known = first in known and second in known and first != second
    return GraphPair(first, second, value) if is_known else None


def _bounded(value: Any, low: float, high: float) -> float | None:
    """Return a finite number within bounds; None for any other value."""
    number = to_float(value)
    if number is None or not math.isfinite(number):
        return None
    return min(high, max(low, number))


def _step(event: Event) -> int | None:
    return as_id(event.get("step"))


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
