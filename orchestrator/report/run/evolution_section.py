"""The page's section on experts that change: their graph over time, and a timeline of the changes."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.record.events.kinds import ExpertChange
from orchestrator.record.experts.expert_changes import change_counts
from orchestrator.report.draw.markup import esc
from orchestrator.report.draw.text import change_text, effect_text
from orchestrator.report.graph.view import (
    Edge,
    Ghost,
    GraphView,
    LayerView,
    Node,
    graph_views,
    num_shapes_of,
    spread,
)
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.sections import heading
from orchestrator.report.run.svg import NUM_COLORS
from orchestrator.types import seconds_text

MAX_FRAMES = 60
MAX_SHAPES = 12_000
"""Shapes of all frames together: more would make the page slow."""
MAX_CHANGES = 200
MAX_HOSTS_LISTED = 8
SCALE = 100
MARGIN = 115
"""Half the width of a drawing, in its own units."""
MAX_LINE_WIDTH = 3.0
MIN_LABEL_RADIUS = 4.5
FULL_RING = 0.999
TONES = {"born": "good", "merged": "info", "pruned": "warn", "undone": "bad"}
EDGE_KEYS = {
    "coactivation": "chosen together",
    "similarity": "alike",
    "parentage": "descends from",
}


def evolution_section(record: RunRecord) -> str:
    """Return the graph and the timeline; empty if the experts never changed and no graph was written."""
    graph = _graph(record)
    changes = _changes(record.expert_changes)
    if not graph and not changes:
        return ""
    return heading("Experts", _subtitle(record)) + graph + changes


def _subtitle(record: RunRecord) -> str:
    counts = change_counts(record.expert_changes)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no change so far"


def _graph(record: RunRecord) -> str:
    views = _frames(record)
    if not views:
        return ""
    num_layers = len(views[0].layers)
    cards = "".join(_layer_card(views, index) for index in range(num_layers))
    width = {1: " one", 3: " three"}.get(num_layers, " three" if num_layers > 4 else "")
    return f'<div class="graphs">{_slider(views)}<div class="grid{width}">{cards}</div>{_key(views)}</div>'


def _frames(record: RunRecord) -> list[GraphView]:
    """Return the drawings that the slider shows: all, or as many as a page can hold."""
    graphs = record.expert_graphs
    num_shapes = max(1, sum(map(num_shapes_of, graphs)))
    limit = min(MAX_FRAMES, max(2, len(graphs) * MAX_SHAPES // num_shapes))
    return graph_views(graphs, record.expert_changes, spread(graphs, limit))


def _slider(views: list[GraphView]) -> str:
    last = len(views) - 1
    label = '<span class="label">Graph of the experts over time</span>'
    field = (
        f'<input type="range" min="0" max="{last}" value="{last}" step="1" aria-label="graph of the experts '
        'over time">'
    )
    return f'<div class="card when">{label}{field}<output>{esc(_frame_text(views[-1]))}</output></div>'


def _frame_text(view: GraphView) -> str:
    counts = [len(layer.nodes) for layer in view.layers if layer is not None]
    return f"step {view.step}, epoch {view.epoch}, {' + '.join(map(str, counts)) or 'no'} experts"


def _layer_card(views: list[GraphView], index: int) -> str:
    frames = [(view, view.layers[index]) for view in views]
    known = [layer for _, layer in frames if layer is not None]
    drawings = "".join(
        f'<g class="frame{" now" if view is views[-1] else ""}" data-text="{esc(_frame_text(view))}">'
        f"{_drawing(layer) if layer is not None else ''}</g>"
        for view, layer in frames
    )
    title = f"Layer {known[-1].layer}" if known else ""
    name = f'<span class="unit">{esc(known[-1].name)}</span>' if known and known[-1].name else ""
    box = f"{-MARGIN} {-MARGIN} {2 * MARGIN} {2 * MARGIN}"
    return (
        f'<figure class="card chart"><figcaption>{esc(title)} {name}</figcaption>'
        f'<svg class="experts" viewBox="{box}" role="img" aria-label="graph of the experts">{drawings}</svg>'
        "</figure>"
    )


def _drawing(layer: LayerView) -> str:
    edges = "".join(map(_edge, layer.edges))
    ghosts = "".join(map(_ghost, layer.ghosts))
    return edges + ghosts + "".join(map(_node, layer.nodes))


def _edge(edge: Edge) -> str:
    x0, y0 = _place(edge.start)
    xm, ym = _place(edge.bend)
    x1, y1 = _place(edge.end)
    width = MAX_LINE_WIDTH * edge.width
    path = f"M{x0} {y0}Q{xm} {ym} {x1} {y1}"
    # A second, wide and invisible line is easier to point at.
    lines = (
        f'<path class="{edge.kind}" stroke-width="{width:.2f}" d="{path}"/><path class="reach" d="{path}"/>'
    )
    return f"<g>{lines}<title>{esc(edge.text)}</title></g>"


def _ghost(ghost: Ghost) -> str:
    x, y = _place(ghost.place)
    radius = ghost.radius * SCALE
    label = _label(x, y, radius, ghost.id)
    text = f"expert {ghost.id} is gone since the graph before"
    return (
        f'<g class="ghost"><circle cx="{x}" cy="{y}" r="{radius:.1f}"/>{label}<title>{esc(text)}</title></g>'
    )


def _node(node: Node) -> str:
    x, y = _place(node.place)
    radius = node.radius * SCALE
    ring = f'cx="{x}" cy="{y}" r="{radius * 1.2:.1f}" stroke-width="{radius * 0.16:.1f}"'
    lived = f'pathLength="100" stroke-dasharray="{100 * node.ring:.1f} 100" transform="rotate(-90 {x} {y})"'
    if node.ring >= FULL_RING:
        lived = ""  # a dash of the whole length leaves a seam
    style = "node warming" if node.expert.warming else "node"
    return (
        f'<g class="{style}"><circle class="ground" cx="{x}" cy="{y}" r="{radius * 1.28:.1f}"/>'
        f"{_slices(node, x, y)}"
        f'<circle class="life" {ring}/><circle class="lived" {ring} {lived}/>'
        f"{_label(x, y, radius, node.expert.id)}<title>{esc(node.text)}</title></g>"
    )


def _slices(node: Node, x: str, y: str) -> str:
    """Return the disc of an expert, with a slice for each copy in the colour of its host."""
    hosts = node.expert.hosts or (0,)
    radius = node.radius * SCALE
    if len(hosts) == 1:
        return f'<circle {_color(hosts[0])} cx="{x}" cy="{y}" r="{radius:.1f}"/>'
    # A thick dashed line on half the radius fills the disc: its dashes are the slices.
    part = 100 / len(hosts)
    ring = f'cx="{x}" cy="{y}" r="{radius / 2:.2f}" stroke-width="{radius:.1f}" pathLength="100"'
    slices = [
        f'<circle class="slice" {_color(host)} {ring} stroke-dasharray="{part:.2f} 100" '
        f'stroke-dashoffset="{-part * index:.2f}" transform="rotate(-90 {x} {y})"/>'
        for index, host in enumerate(hosts)
    ]
    return "".join(slices)


def _color(host: int) -> str:
    return f'style="--c:var(--c{host % NUM_COLORS})"'


def _label(x: str, y: str, radius: float, expert: int) -> str:
    if radius < MIN_LABEL_RADIUS:
        return ""
    return f'<text x="{x}" y="{y}" font-size="{min(10.0, radius):.1f}">{expert}</text>'


def _place(point: tuple[float, float]) -> tuple[str, str]:
    return (f"{point[0] * SCALE:.1f}", f"{point[1] * SCALE:.1f}")


def _key(views: list[GraphView]) -> str:
    hosts = sorted({host for view in views for host in view.hosts})
    keys = [f'<span class="key" {_color(host)}>host {host}</span>' for host in hosts[:MAX_HOSTS_LISTED]]
    if len(hosts) > MAX_HOSTS_LISTED:
        keys.append(f"<span>and {len(hosts) - MAX_HOSTS_LISTED} more hosts</span>")
    kinds = {edge.kind for view in views for layer in view.layers if layer for edge in layer.edges}
    keys += [
        f'<span><svg class="experts line" aria-hidden="true" viewBox="0 0 28 8">'
        f'<path class="{kind}" stroke-width="1.6" d="M1 4H27"/></svg>{text}</span>'
        for kind, text in EDGE_KEYS.items()
        if kind in kinds
    ]
    shown = len(views[0].layers)
    remark = "Area: share of the choices. Ring: part of the training that the expert has lived."
    if any(node.expert.warming for node in _nodes(views)):
        remark += " Pale: warming up."
    if shown < views[0].num_layers:
        remark += f" {shown} of {views[0].num_layers} layers are shown, those with the most changes."
    return f'<div class="parts graph-key">{"".join(keys)}</div><p class="remark">{remark}</p>'


def _nodes(views: Iterable[GraphView]) -> Iterable[Node]:
    return (node for view in views for layer in view.layers if layer is not None for node in layer.nodes)


def _changes(changes: list[ExpertChange]) -> str:
    if not changes:
        return ""
    shown = changes[-MAX_CHANGES:]
    rows = "".join(map(_change_row, shown))
    omitted = len(changes) - len(shown)
    note = f'<p class="remark">{omitted} earlier changes are in events.jsonl.</p>' if omitted else ""
    return f'<ol class="card times changes">{rows}</ol>{note}'


def _change_row(change: ExpertChange) -> str:
    effect = effect_text(change)
    took = f"took {seconds_text(change.seconds)}" if change.seconds else ""
    number = f"{change.experts} experts in the layer" if change.experts is not None else ""
    details = ", ".join(part for part in (effect, number, took) if part)
    reason = f": {esc(change.reason)}" if change.reason else ""
    small = f"<small>{esc(details)}</small>" if details else ""
    return (
        f'<li class="t-{TONES.get(change.change, "calm")}"><span>step {change.step}</span>'
        f"<span>layer {change.layer}</span><em>{esc(change.change)}</em>"
        f"<p>{esc(change_text(change))}{reason}{small}</p></li>"
    )
