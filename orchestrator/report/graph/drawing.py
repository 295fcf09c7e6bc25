"""Drawings of the graph of the experts, for the page and the image file of each epoch.

Nodes are experts: the area is the share of the choices, the colour the host, the ring the part of the
training that the expert has lived. Edges join experts that are chosen together, that are alike, and
that descend from each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from orchestrator.record.events.kinds import ExpertChange, ExpertGraph, GraphExpert, GraphLayer, GraphPair
from orchestrator.report.draw.marks import (
    CARD,
    INK,
    LINE,
    MUTED,
    Color,
    Disc,
    Group,
    Key,
    Path,
    Picture,
    Plot,
    Point,
    Text,
    series_color,
)
from orchestrator.report.graph.layout import MAX_SPACING, expert_places, spacing

T = TypeVar("T")
EdgeKind = Literal["coactivation", "similarity", "parentage"]

MAX_LAYERS = 6
MAX_EDGES = 300
"""Edges of a kind in a layer; of more the strongest are drawn."""
REACH = 1.15
"""Half the width of a plot, in the units of the layout."""
NODE_RADIUS = 0.27 / (2 * REACH)
"""Radius of an expert with the even share, by the distance between neighbours in the layout."""
MIN_SCALE = 0.55
MAX_SCALE = 1.45
RING = (1.28, 1.12)
"""Outer and inner radius of the ring around an expert, by its radius."""
MIN_LABEL_RADIUS = 0.02
"""Smaller nodes have no label."""
MAX_LABEL_SIZE = 0.045
WARMING_SHARE = 0.45
MIN_WIDTH = 0.1
PARENT_WIDTH = 0.4
MAX_EDGE_WIDTH = 13.0
BENDS: dict[EdgeKind, float] = {"coactivation": 0.0, "similarity": 0.16, "parentage": -0.2}
"""Edges of different kinds between the same experts are bent to different sides."""
EDGE_LOOKS: dict[EdgeKind, Key] = {
    "coactivation": Key("chosen together", MUTED),
    "similarity": Key("alike", Color("c3"), dash=(7.0, 9.0)),
    "parentage": Key("descends from", Color("soft"), dash=(22.0, 17.0)),
}
MAX_COLUMNS = 3
SIDES_PX = {1: 580, 2: 430}
SIDE_PX = 270
"""Of a layer in the image file, by the number of columns."""
MAX_HOSTS_LISTED = 8


@dataclass(frozen=True)
class LayerView:
    """A layer of a graph, and its drawing in a square plot: edges, then experts that are gone, then nodes."""

    layer: GraphLayer
    marks: tuple[Group, ...]


@dataclass(frozen=True)
class GraphView:
    step: int
    epoch: int
    layers: tuple[LayerView | None, ...]
    """The shown layers, the same ones in every view; None if this graph does not name the layer."""
    num_layers: int
    """The number of all layers."""

    @property
    def known_layers(self) -> list[LayerView]:
        return [view for view in self.layers if view is not None]

    @property
    def experts(self) -> list[GraphExpert]:
        return [expert for view in self.known_layers for expert in view.layer.experts]


def graph_views(
    graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange], selected: Sequence[ExpertGraph]
) -> list[GraphView]:
    """Return views of the selected graphs of a run, with the layers and places that suit all its graphs."""
    shown = _shown_layers(graphs, changes)
    num_layers = len({layer.layer for graph in graphs for layer in graph.layers})
    columns = [_layer_views(index, graphs, changes, selected) for index in shown]
    return [
        GraphView(graph.step, graph.shown_epoch, tuple(column[at] for column in columns), num_layers)
        for at, graph in enumerate(selected)
    ]


def graph_picture(view: GraphView, name: str) -> Picture:
    """Return a graph: the shown layers beside each other, and a legend below."""
    num_columns = min(MAX_COLUMNS, len(view.layers))
    title = f"Experts of {name}, epoch {view.epoch}, step {view.step}"
    if len(view.layers) < view.num_layers:
        title += f" ({len(view.layers)} of {view.num_layers} layers)"
    height = SIDES_PX.get(num_columns, SIDE_PX)
    plots = [None if layer is None else _layer_plot(layer, height) for layer in view.layers]
    keys = (*graph_keys([view]), Key("ring: time lived"), Key("area: use"))
    return Picture(title, plots, num_columns, keys)


def graph_keys(views: Sequence[GraphView]) -> list[Key]:
    """Return the legend of the hosts and the edges in some views."""
    hosts = sorted({host for view in views for expert in view.experts for host in expert.hosts})
    keys = [Key(f"host {host}", series_color(host)) for host in hosts[:MAX_HOSTS_LISTED]]
    if len(hosts) > MAX_HOSTS_LISTED:
        keys.append(Key(f"and {len(hosts) - MAX_HOSTS_LISTED} more hosts"))
    drawn = {
        (mark.stroke, mark.dash)
        for view in views
        for layer in view.known_layers
        for group in layer.marks
        for mark in group.marks
        if isinstance(mark, Path)
    }
    return keys + [key for key in EDGE_LOOKS.values() if (key.color, key.dash) in drawn]


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


def _layer_plot(view: LayerView, height: int) -> Plot:
    title = f"Layer {view.layer.layer}  {view.layer.name}".strip()
    count = f"{len(view.layer.experts)} experts"
    return Plot(title, view.marks, "graph of the experts", unit=count, height=height, is_square=True)


def _shown_layers(graphs: Sequence[ExpertGraph], changes: Sequence[ExpertChange]) -> list[int]:
    """Return the layers with the most changes, in order."""
    counts = Counter(change.layer for change in changes)
    layers = {layer.layer for graph in graphs for layer in graph.layers}
    return sorted(sorted(layers, key=lambda layer: (-counts[layer], layer))[:MAX_LAYERS])


def _layer_views(
    index: int,
    graphs: Sequence[ExpertGraph],
    changes: Sequence[ExpertChange],
    selected: Sequence[ExpertGraph],
) -> list[LayerView | None]:
    layers = [layer for graph in graphs if (layer := graph.layer(index)) is not None]
    parents = {id_: change.parents for change in changes if change.layer == index for id_ in change.ids}
    parents |= {expert.id: expert.parents for layer in layers for expert in layer.experts}
    places = {id_: _place(place) for id_, place in expert_places(layers, parents).items()}
    drawing = _LayerDrawing(places, spacing(layers))
    views: list[LayerView | None] = []
    before: GraphLayer | None = None
    for graph in selected:
        layer = graph.layer(index)
        views.append(drawing.view(layer, before, graph.step) if layer is not None else None)
        before = layer or before
    return views


def _place(point: Point) -> Point:
    """Return the place in a plot: the y axis of the layout points down."""
    x, y = point
    return (0.5 + x / (2 * REACH), 0.5 - y / (2 * REACH))


@dataclass(frozen=True)
class _LayerDrawing:
    """Draws the graphs of one layer."""

    places: Mapping[int, Point]
    distance: float
    """Between neighbours in the layout."""

    @property
    def radius(self) -> float:
        return NODE_RADIUS * self.distance

    def view(self, layer: GraphLayer, before: GraphLayer | None, step: int) -> LayerView:
        gone = sorted(set(before.ids) - set(layer.ids)) if before is not None else []
        marks = (
            *self._pairs("coactivation", layer.coactivation),
            *self._pairs("similarity", layer.similarity),
            *self._parentage(layer, gone),
            *map(self._ghost, gone),
            *(self._node(expert, len(layer.experts), step) for expert in layer.experts),
        )
        return LayerView(layer, marks)

    def _node(self, expert: GraphExpert, num_experts: int, step: int) -> Group:
        use = expert.share * num_experts
        radius = self.radius * min(MAX_SCALE, max(MIN_SCALE, math.sqrt(use)))
        center = self.places[expert.id]
        outer, inner = (factor * radius for factor in RING)
        lived = min(1.0, expert.age / step) if step > 0 else 1.0
        marks = (
            Disc(center, outer, CARD),
            *_slices(expert, center, radius),
            Disc(center, outer, LINE, hole=inner),
            Disc(center, outer, Color("soft"), end=lived, hole=inner),
            *_label(center, radius, expert.id, INK if expert.warming else CARD),
        )
        return Group(marks, _node_text(expert, use))

    def _ghost(self, expert: int) -> Group:
        """Return an expert that the view before this one had."""
        center = self.places[expert]
        radius = self.radius * MIN_SCALE
        marks = (
            Disc(center, radius, CARD),
            Disc(center, radius, MUTED, hole=0.94 * radius),
            *_label(center, radius, expert, MUTED),
        )
        return Group(marks, f"expert {expert} is gone since the graph before")

    def _pairs(self, kind: EdgeKind, pairs: Sequence[GraphPair]) -> list[Group]:
        strongest = sorted(pairs, key=lambda pair: -abs(pair.value))[:MAX_EDGES]
        return [
            self._edge(kind, pair.first, pair.second, _pair_text(kind, pair), MIN_WIDTH + abs(pair.value))
            for pair in strongest
        ]

    def _parentage(self, layer: GraphLayer, gone: Sequence[int]) -> list[Group]:
        drawn = {*layer.ids, *gone}
        return [
            self._edge("parentage", parent, expert.id, f"expert {expert.id} descends from {parent}")
            for expert in layer.experts
            for parent in expert.parents
            if parent in drawn
        ]

    def _edge(self, kind: EdgeKind, first: int, second: int, text: str, width: float = PARENT_WIDTH) -> Group:
        start, end = self.places[first], self.places[second]
        (x0, y0), (x1, y1) = start, end
        bend = BENDS[kind]
        # The control point of a quadratic curve.
        middle = ((x0 + x1) / 2 + bend * (y1 - y0), (y0 + y1) / 2 - bend * (x1 - x0))
        thinner = self.distance / MAX_SPACING  # among many experts
        look = EDGE_LOOKS[kind]
        curve = Path(
            (("M", (start,)), ("Q", (middle, end))),
            look.color,
            width=MAX_EDGE_WIDTH * min(1.0, width) * thinner,
            dash=look.dash,
        )
        return Group((curve,), text)


def _slices(expert: GraphExpert, center: Point, radius: float) -> Iterable[Disc]:
    """Return the disc of an expert, with a slice for each copy in the colour of its host; pale during the
    warm-up."""
    hosts = expert.hosts or (0,)
    share = WARMING_SHARE if expert.warming else 1.0
    for index, host in enumerate(hosts):
        ends = (index / len(hosts), (index + 1) / len(hosts))
        yield Disc(center, radius, series_color(host, share), *ends)


def _label(center: Point, radius: float, expert: int, color: Color) -> tuple[Text, ...]:
    if radius < MIN_LABEL_RADIUS:
        return ()
    return (Text(center, str(expert), color=color, size=min(MAX_LABEL_SIZE, radius)),)


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
