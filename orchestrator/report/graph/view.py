"""Drawings of the graph of the experts as plain shapes. Image files and the page draw the same ones.

Nodes are experts: the area is the share of the choices, the colour the host, the ring the part of the
training that the expert has lived. Edges join experts that are chosen together, that are alike, and
that descend from each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from orchestrator.record.events.kinds import ExpertChange, ExpertGraph, GraphExpert, GraphLayer, GraphPair
from orchestrator.report.graph.layout import MAX_SPACING, Point, expert_places, spacing

T = TypeVar("T")
EdgeKind = Literal["coactivation", "similarity", "parentage"]

MAX_LAYERS = 6
MAX_EDGES = 300
"""Edges of a kind in a layer; of more the strongest are drawn."""
NODE_RADIUS = 0.27
"""Radius of an expert with the even share, as a part of the distance between neighbours."""
MIN_SCALE = 0.55
MAX_SCALE = 1.45
MIN_WIDTH = 0.1
PARENT_WIDTH = 0.4
BENDS: dict[EdgeKind, float] = {"coactivation": 0.0, "similarity": 0.16, "parentage": -0.2}
"""Edges of different kinds between the same experts are bent to different sides."""


@dataclass(frozen=True)
class Node:
    expert: GraphExpert
    place: Point
    radius: float
    ring: float
    """The part of the training that it has lived, 0 to 1."""
    text: str


@dataclass(frozen=True)
class Edge:
    kind: EdgeKind
    start: Point
    bend: Point
    """Control point of a quadratic curve."""
    end: Point
    width: float
    """0 to 1: by the strength, and thinner among many experts."""
    text: str


@dataclass(frozen=True)
class Ghost:
    """An expert that the view before this one had."""

    id: int
    place: Point
    radius: float


@dataclass(frozen=True)
class LayerView:
    layer: int
    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    ghosts: tuple[Ghost, ...]


@dataclass(frozen=True)
class GraphView:
    step: int
    epoch: int
    layers: tuple[LayerView | None, ...]
    """The shown layers, the same ones in every view; None if this graph does not name the layer."""
    num_layers: int
    """The number of all layers."""

    @property
    def hosts(self) -> set[int]:
        nodes = [node for layer in self.layers if layer is not None for node in layer.nodes]
        return {host for node in nodes for host in node.expert.hosts}


def graph_views(
    graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange], selected: Sequence[ExpertGraph]
) -> list[GraphView]:
    """Return views of the selected graphs of a run, with the layers and places that suit all its graphs."""
    shown = _shown_layers(graphs, changes)
    num_layers = len({layer.layer for graph in graphs for layer in graph.layers})
    columns = [_layer_views(_layer_drawing(index, graphs, changes), index, selected) for index in shown]
    return [
        GraphView(graph.step, graph.shown_epoch, tuple(column[at] for column in columns), num_layers)
        for at, graph in enumerate(selected)
    ]


def num_shapes_of(graph: ExpertGraph) -> int:
    """Return about how many shapes the view of a graph has."""
    sizes = [
        len(layer.experts) + min(MAX_EDGES, len(layer.coactivation)) + min(MAX_EDGES, len(layer.similarity))
        for layer in graph.layers
    ]
    return sum(sorted(sizes)[-MAX_LAYERS:])


def spread(items: list[T], limit: int) -> list[T]:
    """Return at most ``limit`` items, evenly spaced, with the first and the last."""
    if len(items) <= limit:
        return items
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]


def _shown_layers(graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange]) -> list[int]:
    """Return the layers with the most changes, in order."""
    counts = Counter(change.layer for change in changes)
    layers = {layer.layer for graph in graphs for layer in graph.layers}
    return sorted(sorted(layers, key=lambda layer: (-counts[layer], layer))[:MAX_LAYERS])


def _layer_drawing(
    index: int, graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange]
) -> _LayerDrawing:
    layers = [layer for graph in graphs if (layer := graph.layer(index)) is not None]
    parents = {id_: change.parents for change in changes if change.layer == index for id_ in change.ids}
    parents |= {expert.id: expert.parents for layer in layers for expert in layer.experts}
    return _LayerDrawing(expert_places(layers, parents), NODE_RADIUS * spacing(layers))


def _layer_views(
    drawing: _LayerDrawing, index: int, selected: Sequence[ExpertGraph]
) -> list[LayerView | None]:
    views: list[LayerView | None] = []
    before: GraphLayer | None = None
    for graph in selected:
        layer = graph.layer(index)
        views.append(drawing.view(layer, before, graph.step) if layer is not None else None)
        before = layer or before
    return views


@dataclass(frozen=True)
class _LayerDrawing:
    """Draws the graphs of one layer."""

    places: Mapping[int, Point]
    radius: float

    def view(self, layer: GraphLayer, before: GraphLayer | None, step: int) -> LayerView:
        gone = sorted(set(before.ids) - set(layer.ids)) if before is not None else []
        edges = [
            *self._pairs("coactivation", layer.coactivation),
            *self._pairs("similarity", layer.similarity),
            *self._parentage(layer, gone),
        ]
        return LayerView(
            layer=layer.layer,
            name=layer.name,
            nodes=tuple(self._node(expert, len(layer.experts), step) for expert in layer.experts),
            edges=tuple(edges),
            ghosts=tuple(Ghost(id_, self.places[id_], self.radius * MIN_SCALE) for id_ in gone),
        )

    def _node(self, expert: GraphExpert, num_experts: int, step: int) -> Node:
        use = expert.share * num_experts
        scale = min(MAX_SCALE, max(MIN_SCALE, math.sqrt(use)))
        ring = min(1.0, expert.age / step) if step > 0 else 1.0
        return Node(expert, self.places[expert.id], self.radius * scale, ring, _node_text(expert, use))

    def _pairs(self, kind: EdgeKind, pairs: Sequence[GraphPair]) -> list[Edge]:
        strongest = sorted(pairs, key=lambda pair: -abs(pair.value))[:MAX_EDGES]
        return [
            self._edge(kind, pair.first, pair.second, _pair_text(kind, pair), MIN_WIDTH + abs(pair.value))
            for pair in strongest
        ]

    def _parentage(self, layer: GraphLayer, gone: Sequence[int]) -> list[Edge]:
        drawn = {*layer.ids, *gone}
        return [
            self._edge("parentage", parent, expert.id, f"expert {expert.id} descends from {parent}")
            for expert in layer.experts
            for parent in expert.parents
            if parent in drawn
        ]

    def _edge(self, kind: EdgeKind, first: int, second: int, text: str, width: float = PARENT_WIDTH) -> Edge:
        (x0, y0), (x1, y1) = self.places[first], self.places[second]
        bend = BENDS[kind]
        middle = ((x0 + x1) / 2 - bend * (y1 - y0), (y0 + y1) / 2 + bend * (x1 - x0))
        thinner = self.radius / (NODE_RADIUS * MAX_SPACING)
        return Edge(kind, (x0, y0), middle, (x1, y1), min(1.0, width) * thinner, text)


def _node_text(expert: GraphExpert, use: float) -> str:
    hosts = ", ".join(map(str, expert.hosts))
    parts = [
        f"expert {expert.id}: {expert.share:.1%} of the choices ({use:.2f} times the even share)",
        f"size {expert.size:g}" if expert.size is not None else "",
        f"{'host' if len(expert.hosts) == 1 else 'hosts'} {hosts}" if hosts else "",
        f"{expert.age} steps old",
        f"from {' and '.join(map(str, expert.parents))}" if expert.parents else "",
        "warming up" if expert.warming else "",
    ]
    return ", ".join(part for part in parts if part)


def _pair_text(kind: EdgeKind, pair: GraphPair) -> str:
    experts = f"experts {pair.first} and {pair.second}"
    if kind == "coactivation":
        return f"{experts}: chosen together by {pair.value:.0%} of the rarer one's tokens"
    return f"{experts}: similarity {pair.value:.2f}"
