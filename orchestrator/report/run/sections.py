"""Sections of the page: each turns a record into HTML, or into nothing if the record has no data for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator.errors import UserError
from orchestrator.record.events.decoding import finite, measure
from orchestrator.record.events.kinds import Failure
from orchestrator.report.draw.html import (
    Tile,
    badge,
    bullets,
    esc,
    heading,
    labelled_bar,
    note,
    page_head,
    stacked_bar,
    tile_row,
    with_unit,
)
from orchestrator.report.draw.page_plot import color_scale, grid, keys_row
from orchestrator.report.run.figures import stats
from orchestrator.report.run.figures.expert_load import LayerLoad, layer_loads
from orchestrator.report.run.figures.outcome import (
    compile_text,
    identity_code,
    repeated_text,
    score_text,
    status_text,
)
from orchestrator.report.run.figures.panels import Panel, device_panels, training_panels
from orchestrator.report.run.figures.read import UNFINISHED, RunRecord, entries, read_tree, section
from orchestrator.report.run.findings.finding import Finding
from orchestrator.report.run.findings.learning import learning_finding
from orchestrator.report.run.findings.verdict import uneven_experts_finding, verdict
from orchestrator.report.run.load_plot import load_plot, ratio_key
from orchestrator.report.run.panel_plot import curve_key, panel_plot
from orchestrator.types import bytes_text, count_text, counted, flops_text, memory_part_text, seconds_text

TONES = {"completed": "good", "stopped": "info", "failed": "bad", UNFINISHED: "warn"}
ESTIMATED_COLOR = 0
MEASURED_COLOR = 5
_EVALUATIONS = "checkpoints/step_*.*.json"
_MAX_LETTERS = 4000
_PARTS = (("prompt", "Prompt"), ("text", "Generated"), ("reference", "In the data"))


def header(record: RunRecord) -> str:
    """Return name, status and the main facts of a run."""
    num_parameters = finite(record.fact("parameters"))
    has_several_workers = (record.workers or 1) > 1 or bool(record.recoveries)
    facts = {
        "task": record.fact("task"),
        "device": stats.device_name(record),
        "workers": stats.workers_text(record) if has_several_workers else None,
        "precision": record.fact("precision"),
        "batch": record.fact("global_batch_size"),
        "parameters": count_text(num_parameters) if num_parameters else None,
        "took": _duration_text(record),
        "identity": identity_code(record),
    }
    tone = TONES.get(record.status, "calm")
    return page_head(f"<h1>{esc(record.name)}</h1>{badge(tone, record.status)}", facts)


def _duration_text(record: RunRecord) -> str | None:
    if record.seconds is None:
        return None
    steps = f", {counted(record.totals.num_steps, 'step')}" if record.steps else ""
    return seconds_text(record.seconds) + steps


def notes(record: RunRecord) -> str:
    """Return what nobody should miss: a final failure, a missing end, a loss that is nan or infinite."""
    failures = [event for event in record.of(Failure) if event.final is not False]
    lines = [("bad", f"{event.kind or 'failure'}: {event.message}") for event in failures[-3:]]
    if record.status == UNFINISHED:
        lines.append(("warn", status_text(record).capitalize() + "."))
    non_finite = stats.non_finite_text(record)
    if non_finite is not None and learning_finding(record).kind != "diverged":
        rate = "--learning-rate" if record.takes("learning_rate") else "learning rate"
        advice = f"A lower {rate} or --clip-norm may help."
        lines.append(("bad", f"Nan or infinite: {non_finite}. {advice}"))
    return "".join(note(tone, text) for tone, text in lines)


def tiles(record: RunRecord) -> str:
    """Return the figures that people look for first."""
    return tile_row([*_quality_tiles(record), *_speed_tiles(record), *_recovery_tiles(record)])


def _quality_tiles(record: RunRecord) -> list[Tile]:
    shown: list[Tile] = []
    watched = stats.watched_metric(record)
    final = stats.final_evaluation(record)
    best = stats.best_evaluation(record)
    if final is not None:
        names = [watched] if watched != "loss" else [*stats.metric_names(record)[:1], "loss"]
        name = next((name for name in names if stats.score(final, name) is not None), "loss")
        below = f"at step {final.step}"
        if record.final is not None:
            below = f"kept weights, step {record.final.step}"
        shown.append((f"validation {name}", esc(score_text(stats.score(final, name))), below))
    if best is not None:
        text = score_text(stats.score_number(best, watched))
        shown.append((f"best {watched}", esc(text), f"at step {best.step}"))
    if record.steps:
        last = record.steps[-1]
        shown.append(("train loss", esc(score_text(last.loss)), f"at step {last.step}"))
    return shown


def _speed_tiles(record: RunRecord) -> list[Tile]:
    shown: list[Tile] = []
    measured = stats.speed(record)
    if measured is not None:
        below = f"{seconds_text(measured.median_step_s)} per step (median)"
        if measured.units != measured.samples:
            below = f"{measured.units:,.0f} {stats.unit_name(record)}/s"
        digits = 0 if measured.samples >= 100 else 1
        shown.append(("samples / s", f"{measured.samples:,.{digits}f}", below))
    peak = stats.memory(record)
    if peak is not None:
        below = "at its highest" if record.on_gpu else "of the process"
        if peak.efficiency:
            below = f"{peak.efficiency:.0%} of reserved"
        shown.append(("peak memory", with_unit(bytes_text(peak.allocated)), below))
    return shown


def _recovery_tiles(record: RunRecord) -> list[Tile]:
    if not record.recoveries:
        return []
    below = [repeated_text(record)]
    durations = stats.values(record.recoveries, "total_seconds")
    if durations:
        below.insert(0, f"{seconds_text(fmean(durations))} each")
    goodput = finite(record.summary.get("goodput"))
    if goodput is not None:
        below.append(f"goodput {goodput:.1%}")
    return [("recoveries", str(len(record.recoveries)), ", ".join(below))]


def verdict_cards(record: RunRecord) -> str:
    """Return how the model learnt, what the run was bound by, and other findings, side by side."""
    speed_verdict = verdict(record)
    label = "speed" if speed_verdict.kind == "unknown" else f"bound by {speed_verdict.kind}"
    cards = [_finding_card(learning_finding(record), "learning"), _finding_card(speed_verdict, label)]
    uneven = uneven_experts_finding(record)
    if uneven is not None:
        cards.append(_finding_card(uneven, "experts"))
    return f'<div class="verdicts">{"".join(cards)}</div>'


def _finding_card(finding: Finding, label: str) -> str:
    return (
        f'<section class="card note t-{finding.tone}"><div class="label">{label}</div>'
        f"<h3>{esc(finding.headline)}</h3>{bullets(finding.evidence)}"
        f'<div class="label">worth trying</div>{bullets(finding.advice)}</section>'
    )


def training_section(record: RunRecord) -> str:
    return charts("Training", training_panels(record))


def device_section(record: RunRecord) -> str:
    figures = [figure for figure in stats.monitored_figures(record) if figure.unit == "%"]
    means = [f"{figure.name} {figure.mean:.0f}% mean, {figure.peak:.0f}% at most" for figure in figures]
    return charts("Device use", device_panels(record), "; ".join(means[:3]))


def charts(title: str, panels: list[Panel], subtitle: str = "") -> str:
    """Return panels side by side under a heading; empty without panels."""
    if not panels:
        return ""
    width = {1: " one", 3: " three"}.get(len(panels), "")
    return heading(title, subtitle) + grid(list(map(panel_plot, panels)), width)


def experts_section(record: RunRecord) -> str:
    layers = layer_loads(record)
    if not layers:
        return ""
    width = " three" if len(layers) % 3 == 0 or len(layers) > 4 else ""
    if len(layers) == 1:
        width = " one"
    scale = color_scale(ratio_key("share of a layer's tokens, against an even share"))
    title = heading("Use of the experts", _experts_subtitle(layers))
    return title + grid(list(map(load_plot, layers)), width) + scale


def _experts_subtitle(layers: list[LayerLoad]) -> str:
    counts = sorted({layer.num_experts for layer in layers})
    numbers = f"{counted(len(layers), 'layer')} of {' or '.join(map(str, counts))} experts"
    if any(layer.has_changed for layer in layers):
        return f"{numbers} at the end; hatched where an expert did not exist"
    even = f", {1 / counts[0]:.1%} of a layer's tokens each when even" if len(counts) == 1 else ""
    return numbers + even


def time_section(record: RunRecord) -> str:
    """Return the parts of a step and of the whole run."""
    step = stats.phase_seconds(record)
    wall = stats.wall_seconds(record)
    cards = []
    if step:
        measured = stats.speed(record)
        basis = f", mean of {measured.basis}" if measured else ""
        cards.append(_time_card("A step", seconds_text(sum(step.values())) + basis, step))
    if wall:
        cards.append(_time_card("The whole run", seconds_text(sum(wall.values())), wall))
    if not cards:
        return ""
    rate = stats.flops_per_second(record)
    subtitle = f"{flops_text(rate)}/s by the plan's count" if rate else compile_text(record)
    width = " one" if len(cards) == 1 else ""
    return f'{heading("Where the time goes", subtitle)}<div class="grid{width}">{"".join(cards)}</div>'


def _time_card(title: str, subtitle: str, parts: dict[str, float]) -> str:
    texts = {name: seconds_text(seconds) for name, seconds in parts.items()}
    caption = f'<figcaption>{title} <span class="unit">{esc(subtitle)}</span></figcaption>'
    return f'<figure class="card chart">{caption}{stacked_bar(parts, texts)}</figure>'


def memory_section(record: RunRecord) -> str:
    """Return the plan's estimate and the measured peak on one scale, and both again by part."""
    planned = section(record.plan, "memory")
    estimate = finite(planned.get("total")) or sum(part.estimated or 0 for part in stats.memory_parts(record))
    peak = stats.memory(record)
    largest = max(estimate, (peak.reserved or 0) if peak else 0, peak.allocated if peak else 0)
    if not largest:
        return ""
    bars = []
    if estimate:
        bars.append(_memory_bar("estimated", "estimate", estimate, largest, ESTIMATED_COLOR))
    if peak is not None:
        name = "measured" if record.on_gpu else "process"
        bars.append(_memory_bar(name, "allocated", peak.allocated, largest))
        if peak.reserved:
            bars.append(_memory_bar("reserved", "reserved", peak.reserved, largest))
    limit = finite(planned.get("limit"))
    title = heading("Memory", f"the run may use {bytes_text(limit)}" if limit else "")
    by_part = _memory_parts_card(record)
    width = "" if by_part else " one"
    return f'{title}<div class="grid{width}"><div class="card chart">{"".join(bars)}</div>{by_part}</div>'


def _memory_parts_card(record: RunRecord) -> str:
    """Return a pair of bars for each part of the memory: estimated and measured."""
    parts = stats.memory_parts(record)
    if not parts:
        return ""
    peak = stats.memory(record)
    largest = max(max(part.estimated or 0, part.measured or 0) for part in parts)
    is_measured = any(part.measured is not None for part in parts)
    bars = []
    for part in parts:
        label = memory_part_text(part.name)
        name = f"{label}, estimated"
        bars.append(_memory_bar(label, name, part.estimated, largest, ESTIMATED_COLOR))
        if is_measured:
            bars.append(_memory_bar("", f"{label}, measured", part.measured, largest))
    colors = {"estimated": ESTIMATED_COLOR} | ({"measured": MEASURED_COLOR} if is_measured else {})
    keys = keys_row(curve_key(name, color) for name, color in colors.items())
    worker = f"worker {peak.worker}, whose peak is the largest" if peak and peak.worker is not None else ""
    unit = f'<span class="unit">{worker}</span>' if worker else ""
    caption = f'<figcaption>By part {unit}<span class="keys">{keys}</span></figcaption>'
    return f'<figure class="card chart pairs">{caption}{"".join(bars)}</figure>'


def _memory_bar(
    label: str, part: str, size: float | None, largest: float, color: int = MEASURED_COLOR
) -> str:
    text = bytes_text(size) if size is not None else "–"
    return labelled_bar(label, part, size or 0, color, largest, text)


def generations_section(record: RunRecord) -> str:
    """Return a language model's generations, which ``orchestrator evaluate`` writes beside a checkpoint:
    those of the last evaluation that has some."""
    results = [
        result for path in record.folder.glob(_EVALUATIONS) if (result := _read_generations(path)) is not None
    ]
    if not results:
        return ""
    last = max(results, key=lambda result: measure(result.get("time")) or 0.0)
    generations = entries(last, "generations")
    cards = "".join(_generation_card(generation) for generation in generations)
    from_data = any(generation.get("reference") is not None for generation in generations)
    source = f"prompts of the {last.get('split')} data" if from_data else "prompts of --prompts"
    subtitle = f"{source}, continued by the weights of step {last.get('step')} with the most probable tokens"
    return f'{heading("Generations", subtitle)}<div class="grid one">{cards}</div>'


def _read_generations(path: Path) -> dict[str, Any] | None:
    """Return a result with generations; None for others, and for a file that cannot be read."""
    try:
        result = read_tree(path, json.loads)
    except UserError:
        return None  # of no use to a page about the run
    return result if entries(result, "generations") else None


def _generation_card(generation: Mapping[str, Any]) -> str:
    parts = [
        f'<div class="label">{label}</div><code class="command">{esc(text[:_MAX_LETTERS])}</code>'
        for name, label in _PARTS
        if isinstance(text := generation.get(name), str)
    ]
    return f'<div class="card">{"".join(parts)}</div>'
