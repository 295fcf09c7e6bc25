"""The page's section on experts that change: their graph over time, and a timeline of the changes."""

from __future__ import annotations

from orchestrator.record.events.kinds import ExpertChange
from orchestrator.record.experts.expert_changes import change_counts
from orchestrator.report.draw.html import esc, heading
from orchestrator.report.draw.page_plot import SPAN, keys_row, shapes
from orchestrator.report.draw.text import change_text, effect_text
from orchestrator.report.graph.drawing import GraphView, graph_keys, graph_views, num_shapes_of, spread
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.types import seconds_text

MAX_FRAMES = 60
MAX_SHAPES = 12_000
"""Shapes of all frames together: more would make the page slow."""
MAX_CHANGES = 200
TONES = {"born": "good", "merged": "info", "pruned": "warn", "undone": "bad"}


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
    counts = [len(layer.layer.experts) for layer in view.known_layers]
    return f"step {view.step}, epoch {view.epoch}, {' + '.join(map(str, counts)) or 'no'} experts"


def _layer_card(views: list[GraphView], index: int) -> str:
    frames = [(view, view.layers[index]) for view in views]
    drawings = "".join(
        f'<g class="frame{" now" if view is views[-1] else ""}" data-text="{esc(_frame_text(view))}">'
        f"{shapes(layer.marks, is_square=True) if layer is not None else ''}</g>"
        for view, layer in frames
    )
    shown = next((layer.layer for _, layer in reversed(frames) if layer is not None), None)
    title = f"Layer {shown.layer}" if shown else ""
    name = f'<span class="unit">{esc(shown.name)}</span>' if shown and shown.name else ""
    return (
        f'<figure class="card chart"><figcaption>{esc(title)} {name}</figcaption>'
        f'<svg class="experts" viewBox="0 0 {SPAN} {SPAN}" role="img" aria-label="graph of the experts">'
        f"{drawings}</svg></figure>"
    )


def _key(views: list[GraphView]) -> str:
    shown = len(views[0].layers)
    remark = "Area: share of the choices. Ring: part of the training that the expert has lived."
    if any(expert.warming for view in views for expert in view.experts):
        remark += " Pale: warming up."
    if shown < views[0].num_layers:
        remark += f" {shown} of {views[0].num_layers} layers are shown, those with the most changes."
    return f'<div class="parts graph-key">{keys_row(graph_keys(views))}</div><p class="remark">{remark}</p>'


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
