"""Image files of the graph of the experts: one for each epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from orchestrator.report.draw.mpl import COLORS, INK, LINE, MUTED, new_figure, style_axes
from orchestrator.report.graph.view import Edge, EdgeKind, GraphView, LayerView, Node

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 3
MARGIN = 1.15
"""Half the width of a drawing."""
RING_GAP = 0.12
RING_WIDTH = 0.16
"""Of the ring around an expert, as parts of its radius."""
MIN_LABEL_RADIUS = 0.045
"""Smaller nodes have no label."""
MAX_HOSTS_LISTED = 8
EDGE_LOOKS: dict[EdgeKind, dict[str, Any]] = {
    "coactivation": {"edgecolor": INK, "linestyle": "-", "alpha": 0.55},
    "similarity": {"edgecolor": COLORS[3], "linestyle": (0, (1, 2)), "alpha": 0.8},
    "parentage": {"edgecolor": MUTED, "linestyle": (0, (5, 3)), "alpha": 0.9},
}
EDGE_NAMES: dict[EdgeKind, str] = {
    "coactivation": "chosen together",
    "similarity": "alike",
    "parentage": "descends from",
}


def graph_figure(view: GraphView, name: str) -> Figure:
    """Draw a graph: the shown layers beside each other, and a legend below."""
    num_columns = min(MAX_COLUMNS, len(view.layers))
    num_rows = -(-len(view.layers) // num_columns)
    side_in = {1: 6.4, 2: 4.9}.get(num_columns, 3.3)
    title = f"Experts of {name}, epoch {view.epoch}, step {view.step}"
    if len(view.layers) < view.num_layers:
        title += f" ({len(view.layers)} of {view.num_layers} layers)"
    figure = new_figure(side_in * num_rows + 1.1, title)
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for axes, layer in zip(grid.flat, view.layers, strict=False):
        if layer is not None:
            axes.set_visible(True)
            _draw_layer(axes, layer)
    _draw_legend(figure, view)
    return figure


def _draw_layer(axes: Axes, layer: LayerView) -> None:
    count = len(layer.nodes)
    style_axes(axes, f"Layer {layer.layer}  {layer.name}".strip(), f"{count} experts")
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set(xlim=(-MARGIN, MARGIN), ylim=(MARGIN, -MARGIN), aspect="equal", xticks=[], yticks=[])
    for edge in layer.edges:
        _draw_edge(axes, edge)
    for ghost in layer.ghosts:
        _draw_circle(axes, ghost.place, ghost.radius, facecolor="white", edgecolor=MUTED, linestyle=":")
        axes.text(*ghost.place, str(ghost.id), ha="center", va="center", fontsize=7, color=MUTED, zorder=4)
    for node in layer.nodes:
        _draw_node(axes, node)


def _draw_edge(axes: Axes, edge: Edge) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    curve = Path([edge.start, edge.bend, edge.end], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    width = 1.3 if edge.kind == "parentage" else 0.4 + 3.2 * edge.strength
    axes.add_patch(PathPatch(curve, facecolor="none", linewidth=width, zorder=1, **EDGE_LOOKS[edge.kind]))


def _draw_node(axes: Axes, node: Node) -> None:
    from matplotlib.patches import Wedge

    _draw_circle(axes, node.place, node.radius * (1 + RING_GAP + RING_WIDTH), facecolor="white", linewidth=0)
    hosts = node.expert.hosts or (0,)
    alpha = 0.45 if node.expert.warming else 1.0
    for index, host in enumerate(hosts):
        # A slice for each copy, from the top on, clockwise: the y axis points down.
        begin = -90 + 360 * index / len(hosts)
        color = COLORS[host % len(COLORS)]
        end = begin + 360 / len(hosts)
        axes.add_patch(Wedge(node.place, node.radius, begin, end, color=color, alpha=alpha, zorder=3))
    outer = node.radius * (1 + RING_GAP + RING_WIDTH)
    width = node.radius * RING_WIDTH
    axes.add_patch(Wedge(node.place, outer, 0, 360, width=width, color=LINE, zorder=3))
    if node.ring > 0:
        axes.add_patch(Wedge(node.place, outer, -90, -90 + 360 * node.ring, width=width, color=INK, zorder=3))
    if node.radius >= MIN_LABEL_RADIUS:
        text = str(node.expert.id)
        ink = INK if node.expert.warming else "white"
        size = min(12.0, 75 * node.radius)
        axes.text(*node.place, text, ha="center", va="center", fontsize=size, color=ink, zorder=4)


def _draw_circle(axes: Axes, place: tuple[float, float], radius: float, **look: Any) -> None:
    from matplotlib.patches import Circle

    axes.add_patch(Circle(place, radius, zorder=2, **look))


def _draw_legend(figure: Figure, view: GraphView) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hosts = sorted(view.hosts)
    shown = hosts[:MAX_HOSTS_LISTED]
    handles: list[Any] = [Patch(color=COLORS[host % len(COLORS)], label=f"host {host}") for host in shown]
    if len(hosts) > len(shown):
        handles.append(Patch(alpha=0, label=f"and {len(hosts) - len(shown)} more"))
    for kind in _kinds(layer for layer in view.layers if layer is not None):
        look = EDGE_LOOKS[kind]
        line = Line2D([], [], color=look["edgecolor"], linestyle=look["linestyle"], label=EDGE_NAMES[kind])
        handles.append(line)
    ring = {"marker": "o", "markerfacecolor": "none", "markeredgewidth": 2.0, "linestyle": ""}
    handles.append(Line2D([], [], color=INK, label="ring: time lived", **ring))
    handles.append(Patch(alpha=0, label="area: use"))
    look: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": MUTED}
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 9), **look)


def _kinds(layers: Iterable[LayerView]) -> list[EdgeKind]:
    drawn = {edge.kind for layer in layers for edge in layer.edges}
    return [kind for kind in EDGE_NAMES if kind in drawn]
