"""Texts about the outcome of a run that the page and performance_summary.txt share."""

from __future__ import annotations

from orchestrator.report.run.figures.read import UNFINISHED, RunRecord, finite, number
from orchestrator.report.run.figures.stats import is_compiled, plural, values
from orchestrator.types import seconds_text


def status_text(record: RunRecord) -> str:
    """Return the status in words, with its reason if one was recorded."""
    if record.status == UNFINISHED:
        return "unfinished: no end was recorded; the run was killed, or is still running"
    reason = (record.end or {}).get("reason")
    return record.status + (f" ({reason})" if reason else "")


def weights_text(record: RunRecord) -> str:
    """Return the step whose weights the run ended with, and why; empty if it has not ended."""
    if record.final is None:
        return ""
    return f"of step {record.final['step']}: {record.final.get('reason') or record.final.get('weights')}"


def compile_text(record: RunRecord) -> str:
    compiles = record.of("compile")
    if not compiles:
        return "compiled" if is_compiled(record) else "not compiled"
    last = compiles[-1]
    text = str(last.get("status", "unknown"))
    seconds = finite(last.get("seconds"))
    if seconds:
        text += f" in {seconds_text(seconds)}"
    return text + (f" ({last['detail']})" if last.get("detail") else "")


def score_text(value: object) -> str:
    """Return a loss or metric with four significant digits; nan and inf by their names."""
    figure = number(value)
    return "-" if figure is None else f"{figure:.4g}"


def repeated_text(record: RunRecord) -> str:
    lost = max(record.replayed_steps, round(sum(values(record.recoveries, "lost_steps"))))
    return f"{plural(lost, 'step', 'steps')} repeated"
