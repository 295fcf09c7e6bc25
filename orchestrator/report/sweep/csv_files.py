"""The tables of a sweep for programs: ``sweep.csv`` with every trial, ``scaling.csv`` with every series."""

from __future__ import annotations

from typing import Any

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep.facts import one_line
from orchestrator.report.sweep.frames import scaling_frame, trial_frame

MAX_TEXT_CHARS = 4000
"""Characters of a text; sweep.jsonl has the whole of it."""
_FORMULA_STARTS = ("=", "+", "-", "@")


def sweep_csv(record: SweepRecord) -> str:
    """Return one line per trial: status, settings as the plan filled them in, figures, and the
    point as chosen."""
    return _csv(trial_frame(record).reset_index())


def scaling_csv(record: SweepRecord) -> str:
    """Return one line per number of devices of each series, and of the best trials."""
    return _csv(scaling_frame(record).drop(columns="label"))


def _csv(frame: Frame) -> str:
    values = frame.astype(object).where(frame.notna(), None)
    cells = values.map(_cell).rename(columns=_cell)
    return cells.to_csv(index=False, lineterminator="\n")


def _cell(value: Any) -> str:
    """Return one line of text that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    # Text, since pandas would turn a column of integers with gaps into floats.
    if isinstance(value, int | float):
        return str(value)
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    line = one_line(text, MAX_TEXT_CHARS)
    return f"'{line}" if line.startswith(_FORMULA_STARTS) else line
