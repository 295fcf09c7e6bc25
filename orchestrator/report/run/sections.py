"""The parts of the page, each from a record to HTML, or to nothing where the record has no data for it."""

from __future__ import annotations

import re
from statistics import fmean

from orchestrator.report.run.expert_load import LayerLoad, layer_loads
from orchestrator.report.run.panels import Panel, device_panels, panels
from orchestrator.report.run.read import UNFINISHED, RunRecord, finite, section
from orchestrator.report.run.stats import (
    best_evaluation,
    device_name,
    device_use,
    flops_per_second,
    flops_text,
    memory,
    metric,
    metric_names,
    not_finite,
    phase_seconds,
    plural,
    score,
    throughput,
    unit_name,
    values,
    wall_seconds,
    watched_metric,
    workers_text,
)
from orchestrator.report.run.svg import bar, chart, esc, heat_image, stacked
from orchestrator.report.run.text import compile_text, repeated_text, score_text, status_text
from orchestrator.report.run.verdict import Verdict, verdict
from orchestrator.types import bytes_text, count_text, seconds_text

TONES = {"completed": "good", "stopped": "info", "failed": "bad", UNFINISHED: "warn"}
HEADLINES = {
    "data": "The model waits for data",
    "communication": "The workers wait for one another",
    "recovery": "Failures take much of the time",
    "memory": "Memory is the limit",
    "compute": "The arithmetic is the limit",
    "host": "The GPU waits for Python",
    "imbalance": "The work is spread unevenly",
    "evaluation": "Evaluation takes much of the time",
    "checkpoint": "Checkpoints take much of the time",
    "unknown": "Not enough to say",
}


def heading(title: str, aside: str = "") -> str:
    return f"<h2>{esc(title)}{f'<small>{esc(aside)}</small>' if aside else ''}</h2>"


def header(record: RunRecord) -> str:
    """Name, outcome and the facts that place a run."""
    size, took = finite(record.fact("parameters")), record.seconds
    facts = {
        "task": record.fact("task"),
        "device": device_name(record),
        "workers": workers_text(record) if (record.workers or 1) > 1 or record.recoveries else None,
        "precision": record.fact("precision"),
        "batch": record.fact("global_batch_size"),
        "parameters": count_text(size) if size else None,
        "took": seconds_text(took) if took is not None else None,
    }
    shown = "".join(
        f"<div><span>{name}</span>{esc(value)}</div>"
        for name, value in facts.items()
        if value not in (None, "")
    )
    tone = TONES.get(record.status, "calm")
    badge = f'<span class="badge t-{tone}">{esc(record.status)}</span>'
    return f'<header><div class="head"><h1>{esc(record.name)}</h1>{badge}</div><div class="facts">{shown}</div></header>'


def notes(record: RunRecord) -> str:
    """What nobody should overlook: a failure, an end that never came, a loss that is no number."""
    said = [
        ("bad", f"{event.get('kind', 'failure')}: {event.get('message', '')}")
        for event in record.of("failure")
        if event.get("final") is not False
    ]
    said = said[-3:]
    if record.status == UNFINISHED:
        said.append(("warn", status_text(record).capitalize() + "."))
    if (bad := not_finite(record)) is not None:
        said.append(("bad", f"Nan or infinite: {bad}. A lower --learning-rate or --clip-norm may help."))
    return "".join(f'<div class="card note t-{tone}">{_code(text)}</div>' for tone, text in said)


def tiles(record: RunRecord) -> str:
    """The figures one looks for first."""
    return tile_row([*_quality_tiles(record), *_speed_tiles(record)])


def tile_row(found: list[tuple[str, str, str]]) -> str:
    """Tiles of (text above, figure as HTML, text below)."""
    cells = [
        f'<div class="card tile"><div class="label">{esc(a)}</div><b>{b}</b><div class="label">{esc(c)}</div></div>'
        for a, b, c in found
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _quality_tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    found, watched = [], watched_metric(record)
    names = [watched] if watched != "loss" else [*metric_names(record)[:1], "loss"]
    if record.evaluations:
        last, name = (
            record.evaluations[-1],
            next((name for name in names if score(record.evaluations[-1], name) is not None), "loss"),
        )
        found.append((f"validation {name}", esc(score_text(score(last, name))), f"at step {last['step']}"))
    if (best := best_evaluation(record)) is not None:
        found.append((f"best {watched}", esc(score_text(metric(best, watched))), f"at step {best['step']}"))
    if record.steps:
        found.append(
            (
                "train loss",
                esc(score_text(record.steps[-1].get("loss"))),
                f"at step {record.steps[-1]['step']}",
            )
        )
    return found


def _speed_tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    found = []
    if (rate := throughput(record)) is not None:
        beside = (
            f"{rate.units:,.0f} {unit_name(record)}/s"
            if rate.units
            else f"{seconds_text(rate.step_s)} per step"
        )
        found.append(("samples / s", f"{rate.samples:,.{0 if rate.samples >= 100 else 1}f}", beside))
    if (peak := memory(record)) is not None:
        beside = (
            f"{peak.efficiency:.0%} of reserved"
            if peak.efficiency
            else "of the process"
            if not record.on_gpu
            else "at its highest"
        )
        found.append(("peak memory", with_unit(bytes_text(peak.allocated)), beside))
    if record.seconds is not None and record.steps:
        found.append(
            ("time", with_unit(seconds_text(record.seconds)), plural(len(record.steps), "step", "steps"))
        )
    if record.recoveries:
        took = values(record.recoveries, "total_seconds")
        each = [f"{seconds_text(fmean(took))} each"] if took else []
        goodput = finite(record.summary.get("goodput"))
        beside = ", ".join(
            [*each, repeated_text(record), *([] if goodput is None else [f"goodput {goodput:.1%}"])]
        )
        found.append(("recoveries", str(len(record.recoveries)), beside))
    return found


def with_unit(text: str) -> str:
    """'31.2 GiB' with a smaller unit; durations of several parts stay as they are."""
    number, _, unit = text.partition(" ")
    return f"{esc(number)}<i> {esc(unit)}</i>" if unit.isalpha() or unit == "µs" else esc(text)


def verdict_box(record: RunRecord) -> str:
    found: Verdict = verdict(record)
    label = "verdict" if found.bound_by == "unknown" else f"bound by {found.bound_by}"
    tone = "calm" if found.bound_by == "unknown" else "good" if found.bound_by == "compute" else "warn"
    because, tries = (
        f"<ul>{''.join(f'<li>{_code(line)}</li>' for line in lines)}</ul>"
        for lines in (found.evidence, found.advice)
    )
    return (
        f'<div class="card note verdict t-{tone}"><div><div class="label">{label}</div>'
        f'<h3>{esc(HEADLINES[found.bound_by])}</h3></div><div><div class="label">because</div>{because}</div>'
        f'<div><div class="label">worth trying</div>{tries}</div></div>'
    )


def _code(text: str) -> str:
    """Text with our flags set as code."""
    return re.sub(
        r"(?<![\w-])(--[a-z][a-z0-9-]*(?: (?:on|auto|bf16|reduce-overhead|[0-9][0-9.e-]*))?)",
        r'<code class="flag">\1</code>',
        esc(text),
    )


def curves(record: RunRecord) -> str:
    return _charts("Training", panels(record))


def device(record: RunRecord) -> str:
    means = [
        f"{use.name} {use.mean:.0f}% mean, {use.peak:.0f}% at most"
        for use in device_use(record)
        if use.unit == "%"
    ]
    return _charts("Device use", device_panels(record), "; ".join(means[:3]))


def _charts(title: str, shown: list[Panel], aside: str = "") -> str:
    width = {1: " one", 3: " three"}.get(len(shown), "")
    return (
        f'{heading(title, aside)}<div class="grid{width}">{"".join(map(chart, shown))}</div>' if shown else ""
    )


def experts(record: RunRecord) -> str:
    layers = layer_loads(record)
    if not layers:
        return ""
    width = "one" if len(layers) == 1 else "three" if len(layers) % 3 == 0 or len(layers) > 4 else ""
    scale = '<div class="scale">a quarter of the even share or less<i></i>four times or more</div>'
    return f'{heading("Use of the experts", _experts_aside(layers))}<div class="grid {width}">{"".join(map(_layer, layers))}</div>{scale}'


def _experts_aside(layers: list[LayerLoad]) -> str:
    counts = sorted({layer.experts for layer in layers})
    even = f", {1 / counts[0]:.1%} of a layer's tokens each when even" if len(counts) == 1 else ""
    return f"{plural(len(layers), 'layer', 'layers')} of {' or '.join(map(str, counts))} experts{even}"


def _layer(layer: LayerLoad) -> str:
    recent = layer.recent()
    beside = f"{min(recent):.2f}× to {max(recent):.2f}× the even share" if recent else ""
    caption = f'<figcaption>Layer {layer.layer}<span class="keys"><span class="unit">{beside}</span></span></figcaption>'
    image = heat_image(
        layer.ratios,
        f"Layer {layer.layer}: rows are experts, columns time, colour is share of tokens. {beside}",
    )
    ends = f'<div class="ends"><span>expert 0–{layer.experts - 1}, top to bottom</span><span>step {layer.steps[-1]}</span></div>'
    return f'<figure class="card chart heat">{caption}{image}{ends}</figure>'


def time_spent(record: RunRecord) -> str:
    """Where a step's time goes, and where the run's went."""
    step, wall = phase_seconds(record), wall_seconds(record)
    boxes = [
        ("A step", f"{seconds_text(sum(step.values()))} on average", step),
        ("The whole run", seconds_text(sum(wall.values())), wall),
    ]
    cards = [
        f'<figure class="card chart"><figcaption>{title} <span class="unit">{esc(aside)}</span></figcaption>'
        f"{stacked(parts, {name: seconds_text(value) for name, value in parts.items()})}</figure>"
        for title, aside, parts in boxes
        if parts
    ]
    rate = flops_per_second(record)
    aside = ", ".join([f"{flops_text(rate)} by the plan's count"] if rate else []) or compile_text(record)
    width = " one" if len(cards) == 1 else ""
    return (
        f'{heading("Where the time goes", aside)}<div class="grid{width}">{"".join(cards)}</div>'
        if cards
        else ""
    )


def memory_bars(record: RunRecord) -> str:
    """The plan's estimate beside the measured peak, on one scale."""
    planned, peak = section(record.plan, "memory"), memory(record)
    parts = [
        (name, size)
        for name, raw in planned.items()
        if name not in ("total", "limit") and (size := finite(raw))
    ]
    total, limit = (
        finite(planned.get("total")) or sum(size for _, size in parts),
        finite(planned.get("limit")),
    )
    whole = max(total, peak.reserved or 0 if peak else 0, peak.allocated if peak else 0)
    if not whole:
        return ""
    colored = [(name, size, index % 5) for index, (name, size) in enumerate(parts)]
    rows = [bar("estimated", colored, whole, bytes_text(total))] if total else []
    if peak is not None:
        rows.append(
            bar(
                "measured" if record.on_gpu else "process",
                [("allocated", peak.allocated, 5)],
                whole,
                bytes_text(peak.allocated),
            )
        )
        if peak.reserved:
            rows.append(bar("reserved", [("reserved", peak.reserved, 5)], whole, bytes_text(peak.reserved)))
    keys = "".join(
        f'<span class="key" style="--c:var(--c{color})">{esc(name)} <b>{bytes_text(size)}</b></span>'
        for name, size, color in colored
    )
    aside = f"the run may use {bytes_text(limit)}" if limit else ""
    return f'{heading("Memory", aside)}<div class="card chart">{"".join(rows)}<div class="parts">{keys}</div></div>'
