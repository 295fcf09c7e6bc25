"""Texts about the outcome of a run that the page and performance_summary.txt share."""

from __future__ import annotations

import re

from orchestrator.record.events.kinds import Compile, Digest
from orchestrator.report.draw import text
from orchestrator.report.run.figures.read import UNFINISHED, RunRecord
from orchestrator.report.run.figures.stats import is_compiled, values
from orchestrator.types import counted

_DIGEST = re.compile(r"[0-9a-f]{16}")


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


def identity_code(record: RunRecord) -> str:
    """Return the code of the weights at the last digest: runs with one code have equal weights. Empty if the
    run is not reproducible, or has no digest yet."""
    digests = record.of(Digest)
    # A record is plain text, and may be damaged.
    weights = digests[-1].weights if digests else ""
    if not _DIGEST.fullmatch(weights):
        return ""
    return "-".join(weights[begin : begin + 4] for begin in range(0, len(weights), 4))


def identity_text(record: RunRecord) -> str:
    """Return the code with its step."""
    code = identity_code(record)
    return f"{code} (weights after step {record.of(Digest)[-1].step})" if code else ""


def compile_text(record: RunRecord) -> str:
    compiles = record.of(Compile)
    if not compiles:
        return "compiled" if is_compiled(record) else "not compiled"
    return text.compile_text(compiles[-1])


def score_text(value: float | None) -> str:
    """Return a loss or metric with four significant digits; nan and inf by their names."""
    return "-" if value is None else f"{value:.4g}"


def repeated_text(record: RunRecord) -> str:
    lost = max(record.replayed_steps, round(sum(values(record.recoveries, "lost_steps"))))
    return f"{counted(lost, 'step')} repeated"
