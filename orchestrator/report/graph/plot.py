"""Drawings of the graph of the experts, for the page and the image file of each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.report.draw.marks import (
    CARD,
    INK,
    LINE,
    MUTED,
    Color,
    Disc,
    Group,
    Key,
    Mark,
    Path,
    Picture,
    Plot,
    Point,
    Text,
    series_color,
)
from orchestrator.report.graph.view import Edge, EdgeKind, Ghost, GraphView, LayerView, Node

MAX_COLUMNS = 3
SIDES_PX = {1: 580, 2: 430}
SIDE_PX = 270
"""Of a layer in the image file, by the number of columns."""
REACH = 1.15
"""Half the width of a plot, in the units of a view."""
RING = (1.28, 1.12)
"""Outer and inner radius of the ring around an expert, by its radius."""
MIN_LABEL_RADIUS = 0.02
"""Smaller nodes have no label."""
MAX_LABEL_SIZE = 0.045
MAX_EDGE_WIDTH = 13.0
MAX_HOSTS_LISTED = 8
WARMING_SHARE = 0.45
EDGE_LOOKS: dict[EdgeKind, Key] = {
    "coactivation": Key("chosen together", MUTED),
    "similarity": Key("alike", Color("c3"), dash=(7.0, 9.0)),
    "parentage": Key("descends from", Color("soft"), dash=(22.0, 17.0)),
}


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
    hosts = sorted({host for view in views for host in view.hosts})
    keys = [Key(f"host {host}", series_color(host)) for host in hosts[:MAX_HOSTS_LISTED]]
    if len(hosts) > MAX_HOSTS_LISTED:
        keys.append(Key(f"and {len(hosts) - MAX_HOSTS_LISTED} more hosts"))
    kinds = {edge.kind for view in views for layer in view.layers if layer for edge in layer.edges}
    return keys + [key for kind, key in EDGE_LOOKS.items() if kind in kinds]


def layer_marks(layer: LayerView) -> list[Mark]:
    return [*map(_edge, layer.edges), *map(_ghost, layer.ghosts), *map(_node, layer.nodes)]


def _layer_plot(layer: LayerView, height: int) -> Plot:
    title = f"Layer {layer.layer}  {layer.name}".strip()
    marks = tuple(layer_marks(layer))
    count = f"{len(layer.nodes)} experts"
    return Plot(title, marks, "graph of the experts", unit=count, height=height, is_square=True)


def _edge(edge: Edge) -> Group:
    look = EDGE_LOOKS[edge.kind]
    start, bend, end = map(_place, (edge.start, edge.bend, edge.end))
    curve = Path(
        (("M", (start,)), ("Q", (bend, end))),
        look.color,
        width=MAX_EDGE_WIDTH * edge.width,
        dash=look.dash,
    )
    return Group((curve,), edge.text)


def _ghost(ghost: Ghost) -> Group:
    center = _place(ghost.place)
    radius = _length(ghost.radius)
    marks = (Disc(center, radius, CARD), Disc(center, radius, MUTED, hole=0.94 * radius))
    label = _label(center, radius, ghost.id, MUTED)
    return Group((*marks, *label), f"expert {ghost.id} is gone since the graph before")


def _node(node: Node) -> Group:
    center = _place(node.place)
    radius = _length(node.radius)
    outer, inner = (factor * radius for factor in RING)
    marks = [
        Disc(center, outer, CARD),
        *_slices(node, center, radius),
        Disc(center, outer, LINE, hole=inner),
        Disc(center, outer, Color("soft"), end=node.ring, hole=inner),
    ]
    label = _label(center, radius, node.expert.id, INK if node.expert.warming else CARD)
    return Group((*marks, *label), node.text)


def _slices(node: Node, center: Point, radius: float) -> Iterable[Disc]:
    """Return the disc of an expert, with a slice for each copy in the colour of its host; pale during the
    warm-up."""
    hosts = node.expert.hosts or (0,)
    share = WARMING_SHARE if node.expert.warming else 1.0
    for index, host in enumerate(hosts):
        ends = (index / len(hosts), (index + 1) / len(hosts))
        yield Disc(center, radius, series_color(host, share), *ends)


def _label(center: Point, radius: float, expert: int, color: Color) -> tuple[Text, ...]:
    if radius < MIN_LABEL_RADIUS:
        return ()
    return (Text(center, str(expert), color=color, size=min(MAX_LABEL_SIZE, radius)),)


def _place(point: Point) -> Point:
    """Return the place in a plot: the y axis of a view points down."""
    return (0.5 + _length(point[0]), 0.5 - _length(point[1]))


def _length(length: float) -> float:
    return length / (2 * REACH)
