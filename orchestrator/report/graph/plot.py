"""Image files of the graph of the experts: one for each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.report.draw.mpl import COLORS, INK, LINE, MUTED, new_figure, style_axes
from orchestrator.report.graph.view import Edge, EdgeKind, Ghost, GraphView, LayerView, Node

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Wedge

MAX_COLUMNS = 3
MARGIN = 1.15
"""Half the width of a drawing."""
RING_GAP = 0.12
RING_WIDTH = 0.16
"""Of the ring around an expert, as parts of its radius."""
MIN_LABEL_RADIUS = 0.045
"""Smaller nodes have no label."""
MAX_LINE_WIDTH = 3.6
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
    for kind in EDGE_NAMES:
        _draw_edges(axes, kind, [edge for edge in layer.edges if edge.kind == kind])
    _draw_ghosts(axes, layer.ghosts)
    _draw_nodes(axes, layer.nodes)
    for node in layer.nodes:
        if node.radius >= MIN_LABEL_RADIUS:
            ink = INK if node.expert.warming else "white"
            _label(axes, node.place, str(node.expert.id), color=ink, fontsize=min(12.0, 75 * node.radius))


def _draw_edges(axes: Axes, kind: EdgeKind, edges: Sequence[Edge]) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    codes = [Path.MOVETO, Path.CURVE3, Path.CURVE3]
    curves = [Path([edge.start, edge.bend, edge.end], codes) for edge in edges]
    widths = [MAX_LINE_WIDTH * edge.width for edge in edges]
    axes.add_collection(
        PathCollection(curves, facecolor="none", linewidths=widths, zorder=1, **EDGE_LOOKS[kind]),
        autolim=False,
    )


def _draw_ghosts(axes: Axes, ghosts: Sequence[Ghost]) -> None:
    from matplotlib.patches import Circle

    for ghost in ghosts:
        look: dict[str, Any] = {"facecolor": "white", "edgecolor": MUTED, "linestyle": ":", "zorder": 2}
        axes.add_patch(Circle(ghost.place, ghost.radius, **look))
        if ghost.radius >= MIN_LABEL_RADIUS:
            _label(axes, ghost.place, str(ghost.id), color=MUTED, fontsize=7)


def _draw_nodes(axes: Axes, nodes: Sequence[Node]) -> None:
    """Draw discs and rings as one collection: a patch each would take seconds with many experts."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Wedge

    shapes: list[tuple[Wedge, Any]] = []
    for node in nodes:
        outer = node.radius * (1 + RING_GAP + RING_WIDTH)
        width = node.radius * RING_WIDTH
        shapes.append((Wedge(node.place, outer, 0, 360), "white"))
        shapes += _slices(node)
        shapes.append((Wedge(node.place, outer, 0, 360, width=width), LINE))
        # From the top on, clockwise: the y axis points down.
        shapes.append((Wedge(node.place, outer, -90, -90 + 360 * node.ring, width=width), INK))
    colors = [color for _, color in shapes]
    wedges = [wedge for wedge, _ in shapes]
    axes.add_collection(PatchCollection(wedges, facecolors=colors, linewidths=0, zorder=3), autolim=False)


def _slices(node: Node) -> list[tuple[Wedge, Any]]:
    """Return a slice for each copy, in the colour of its host; pale during the warm-up."""
    from matplotlib.patches import Wedge

    hosts = node.expert.hosts or (0,)
    alpha = 0.45 if node.expert.warming else 1.0
    ends = [-90 + 360 * index / len(hosts) for index in range(len(hosts) + 1)]
    return [
        (Wedge(node.place, node.radius, begin, end), (COLORS[host % len(COLORS)], alpha))
        for host, begin, end in zip(hosts, ends, ends[1:], strict=False)
    ]


def _label(axes: Axes, place: tuple[float, float], text: str, **look: Any) -> None:
    label = axes.text(*place, text, ha="center", va="center", zorder=4, **look)
    # The layout of the figure need not measure every label.
    label.set_in_layout(False)


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
    ring: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "markeredgewidth": 2.0, "linestyle": ""}
    handles.append(Line2D([], [], color=INK, label="ring: time lived", **ring))
    handles.append(Patch(alpha=0, label="area: use"))
    look: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": MUTED}
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 9), **look)


def _kinds(layers: Iterable[LayerView]) -> list[EdgeKind]:
    drawn = {edge.kind for layer in layers for edge in layer.edges}
    return [kind for kind in EDGE_NAMES if kind in drawn]
