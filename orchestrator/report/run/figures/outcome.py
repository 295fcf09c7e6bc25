"""Texts about the outcome of a run that the page and performance_summary.txt share."""

from __future__ import annotations

from orchestrator.record.events.kinds import Compile
from orchestrator.report.run.figures.read import UNFINISHED, RunRecord
from orchestrator.report.run.figures.stats import is_compiled, plural, values
from orchestrator.types import seconds_text


def status_text(record: RunRecord) -> str:
    """Return the status in words, with its reason if one was recorded."""
    if record.status == UNFINISHED:
        return "unfinished: no end was recorded; the run was killed, or is still running"
    reason = record.end.reason if record.end is not None else ""
    return record.status + (f" ({reason})" if reason else "")


def weights_text(record: RunRecord) -> str:
    """Return the step whose weights the run ended with, and why; empty if it has not ended."""
    if record.final is None:
        return ""
    return f"of step {record.final.step}: {record.final.reason or record.final.weights}"


def compile_text(record: RunRecord) -> str:
    compiles = record.of(Compile)
    if not compiles:
        return "compiled" if is_compiled(record) else "not compiled"
    last = compiles[-1]
    text = last.status or "unknown"
    if last.seconds:
        text += f" in {seconds_text(last.seconds)}"
    return text + (f" ({last.detail})" if last.detail else "")


def score_text(value: float | None) -> str:
    """Return a loss or metric with four significant digits; nan and inf by their names."""
    return "-" if value is None else f"{value:.4g}"


def repeated_text(record: RunRecord) -> str:
    lost = max(record.replayed_steps, round(sum(values(record.recoveries, "lost_steps"))))
    return f"{plural(lost, 'step', 'steps')} repeated"
