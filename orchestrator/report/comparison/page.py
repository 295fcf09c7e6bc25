"""``comparison.html``: runs next to each other, in a single file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.record.files.event_log import encode_event
from orchestrator.report.comparison.compare import Comparison
from orchestrator.report.comparison.curves import panels_by_step, panels_by_time
from orchestrator.report.comparison.differences import Difference, environment
from orchestrator.report.comparison.figures import Figure
from orchestrator.report.comparison.verdicts import Outcome
from orchestrator.report.draw.html import (
    badge,
    bullets,
    document,
    esc,
    footer,
    header_cells,
    heading,
    page_head,
    table,
)
from orchestrator.report.draw.page_plot import keys_row
from orchestrator.report.run.figures.timeline import TimelineRow, timeline_rows
from orchestrator.report.run.panel_plot import curve_key
from orchestrator.report.run.sections import TONES, charts
from orchestrator.storage.local_files import write_whole
from orchestrator.types import counted

PAGE = "comparison.html"
DATA = "comparison.json"
OUTCOME_TONES: dict[Outcome, str] = {
    "better": "good",
    "within noise": "calm",
    "far ahead": "good",
    "ahead": "info",
    "equal": "calm",
    "one setting": "info",
}
RESTARTS = ("resume", "changed settings", "out of memory", "failure", "recovery")
"""Rows of a timeline that say why a run did not go straight on."""


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write page and data into a folder and return their paths."""
    data = encode_event(comparison.to_json()) + "\n"
    return [write_whole(folder / DATA, data), write_whole(folder / PAGE, comparison_page(comparison))]


def comparison_page(comparison: Comparison) -> str:
    """Return the page as text."""
    runs = comparison.runs
    body = [
        _header(comparison),
        _first_card(comparison),
        charts("By step", panels_by_step(runs)),
        _verdicts(comparison),
        heading("Results", f"validation: {comparison.judged_at}") + _results(comparison),
        _differences(comparison, "Settings that differ", comparison.settings),
        charts("By time", panels_by_time(runs), "since the start, without pauses between sessions"),
        heading("Training losses, step by step") + _losses(comparison),
        _differences(comparison, "Hardware and software that differ", comparison.environment),
        _restarts(comparison),
        footer(["orchestrator report " + " ".join(run.location for run in runs)]),
    ]
    return document(f"Comparison of {', '.join(comparison.labels)}", body)


def _header(comparison: Comparison) -> str:
    first = comparison.runs[0]
    differing = {difference.name for difference in comparison.environment}
    facts = {"task": first.record.fact("task"), "runs": len(comparison.runs)}
    facts |= {name: value for name, value in environment(first).items() if name not in differing}
    names = ("task", "runs", "device", "workers", "torch")
    known = {name: facts[name] for name in names if facts.get(name)}
    return page_head(f"<h1>Comparison of {counted(len(comparison.runs), 'run')}</h1>", known)


def _first_card(comparison: Comparison) -> str:
    """Return the verdict on quality in a sentence, its figures, and what a reader must know first."""
    first = comparison.verdicts[:1]
    lines = [*(f"{verdict.figure}: {verdict.text}" for verdict in first), *comparison.notes]
    if not lines:
        return ""
    tone = OUTCOME_TONES[first[0].outcome] if first else "warn"
    title = f"<h3>{esc(comparison.headline)}</h3>" if first else ""
    card = f'<section class="card note t-{tone}">{title}{bullets(lines)}</section>'
    return f'<div class="verdicts">{card}</div>'


def _verdicts(comparison: Comparison) -> str:
    if not comparison.verdicts:
        return ""
    rows = ""
    for verdict in comparison.verdicts:
        outcome = badge(OUTCOME_TONES[verdict.outcome], verdict.outcome)
        rows += _row(verdict.figure, f"<td>{outcome}</td><td>{esc(verdict.text)}</td>")
    head = header_cells("figure", "verdict", "because")
    return heading("Verdicts") + _card(table("Verdicts", head, rows))


def _results(comparison: Comparison) -> str:
    statuses = [(run.record.status, TONES.get(run.record.status, "calm")) for run in comparison.runs]
    cells = "".join(
        f'<td><span class="end-of t-{tone}">{esc(status)}</span></td>' for status, tone in statuses
    )
    rows = _row("status", cells)
    if comparison.identities:
        codes = "".join(f'<td class="mono">{esc(code)}</td>' for code in comparison.identities)
        rows += _row("identity", codes)
    rows += "".join(map(_result_row, comparison.figures))
    return _card(table("Results", _run_heads(comparison), rows, "runs"))


def _result_row(figure: Figure) -> str:
    cells = ""
    for text, value in zip(figure.texts, figure.values, strict=True):
        is_best = value is not None and value == figure.best
        cells += f'<td class="figure">{f"<b>{esc(text)}</b>" if is_best else esc(text)}</td>'
    return _row(figure.name, cells)


def _row(name: str, cells: str) -> str:
    return f'<tr><th scope="row">{esc(name)}</th>{cells}</tr>'


def _run_heads(comparison: Comparison) -> str:
    """Return a header for each run, with the colour of its curves."""
    keys = [keys_row([curve_key(run.label, place)]) for place, run in enumerate(comparison.runs)]
    return header_cells("") + "".join(f'<th scope="col">{key}</th>' for key in keys)


def _differences(comparison: Comparison, title: str, found: Sequence[Difference]) -> str:
    if not found:
        return heading(title, "none")
    rows = ""
    for difference in found:
        cells = "".join(f'<td class="mono">{esc(text)}</td>' for text in difference.texts)
        rows += _row(difference.name, cells)
    return heading(title) + _card(table(title, _run_heads(comparison), rows, "runs"))


def _losses(comparison: Comparison) -> str:
    rows = ""
    for agreement in comparison.losses:
        is_equal = "yes" if agreement.is_bitwise else "no"
        rows += _row(agreement.label, f"<td>{is_equal}</td><td>{esc(agreement.text)}</td>")
    head = header_cells("run", "bitwise equal", f"losses against {comparison.labels[0]}")
    return _card(table("Training losses", head, rows))


def _restarts(comparison: Comparison) -> str:
    """Return resumes, failures and recoveries of all runs."""
    rows = ""
    for run in comparison.runs:
        restarts = [row for row in timeline_rows(run.record) if row.kind in RESTARTS]
        rows += "".join(_restart_row(run.label, row) for row in restarts)
    if not rows:
        return heading("Restarts and recoveries", "none")
    head = header_cells("run", "step", "event", "what happened")
    return heading("Restarts and recoveries") + _card(table("Restarts and recoveries", head, rows))


def _restart_row(label: str, row: TimelineRow) -> str:
    step = "" if row.step is None else str(row.step)
    event = f'<span class="end-of t-{row.tone}">{esc(row.kind)}</span>'
    return _row(label, f"<td>{step}</td><td>{event}</td><td>{esc(row.text)}</td>")


def _card(content: str) -> str:
    return f'<div class="card framed">{content}</div>'
