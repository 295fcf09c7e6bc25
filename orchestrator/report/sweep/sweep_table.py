"""The table of a running sweep and the texts in it: trials, settings, figures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.config.sweep.objective import THROUGHPUT, read_objective
from orchestrator.record.files.ledger import STATUSES, TrialRow, rank_trials
from orchestrator.report.draw.display import printable_line
from orchestrator.types import bytes_text, seconds_text, speed_text, value_text

if TYPE_CHECKING:
    from rich.table import Table

NUM_BEST = 10  # trials in the table
NUM_RUNNING = 6  # running trials in the table


@dataclass(frozen=True)
class RunningTrial:
    """A trial that is running."""

    trial: int
    point: Mapping[str, Any]
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class SweepState:
    """A running sweep: the trials in the table, and how many there are in all."""

    rows: Sequence[TrialRow]
    running: Sequence[RunningTrial]
    total: int
    done: int
    """Finished trials; more than ``rows`` if earlier trials are not known one by one."""
    objective: str = "throughput"


def live_table(state: SweepState, encoding: str = "utf-8") -> Table:
    """Return the best trials so far, the running ones, how the others ended, and the time left."""
    from rich.table import Table
    from rich.text import Text

    def clean(text: str) -> Text:
        return Text(printable_line(text, encoding))

    table = Table(
        title=clean(headline(state.rows, len(state.running), state.total, state.done)),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        border_style="dim",
    )
    shown = None if state.objective == THROUGHPUT else state.objective
    outcome = [] if shown is None else [read_objective(shown).name.removeprefix("validation_")]
    for name in ("trial", "settings", *outcome, "samples/s", "memory", "took"):
        is_text = name == "settings"
        table.add_column(
            name, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis"
        )
    best = rank_trials(state.rows, state.objective)[:NUM_BEST]
    running = state.running[:NUM_RUNNING]
    names = differing_settings([trial.point for trial in (*best, *running)])
    for place, row in enumerate(best):
        style = "bold green" if place == 0 else ""
        table.add_row(*map(clean, _best_cells(row, names, shown)), style=style)
    if running and table.row_count:
        table.add_section()
    for trial in running:
        table.add_row(*map(clean, _running_cells(trial, names, shown)), style="cyan")
    return table


def _best_cells(row: TrialRow, names: Sequence[str], objective: str | None) -> list[str]:
    """Return the cells of a completed trial; ``objective`` has a column of its own."""
    cells = [f"{row.trial}", point_text(row.point, names)]
    if objective is not None:
        cells.append(_value_text(row.value(objective)))
    return [*cells, throughput_text(row), _memory_text(row), _duration_text(row.seconds)]


def _running_cells(trial: RunningTrial, names: Sequence[str], objective: str | None) -> list[str]:
    cells = [f"{trial.trial}", point_text(trial.point, names)]
    if objective is not None:
        cells.append("")
    return [*cells, "running", "", f"{time.monotonic() - trial.started_s:.0f} s"]


def headline(rows: Sequence[TrialRow], running: int, total: int, done: int) -> str:
    """Return the state of a sweep in a line.

    Example: '17 of 24 trials: 12 completed, 4 infeasible, 1 failed; 2 running; about 1m 10s left'.
    """
    counts = {status: sum(row.status == status for row in rows) for status in STATUSES}
    ends = [f"{count} {status.replace('_', ' ')}" for status, count in counts.items() if count]
    if done > len(rows):
        ends.append(f"{done - len(rows)} before")
    parts = [f"{done} of {total} trials" + (f": {', '.join(ends)}" if ends else "")]
    if running:
        parts.append(f"{running} running")
    left = seconds_left(rows, running, total - done)
    if left:
        parts.append(f"about {seconds_text(left)} left")
    return "; ".join(parts)


def seconds_left(rows: Iterable[TrialRow], running: int, left: int) -> float | None:
    """Return the seconds until the last trial ends, from the mean duration so far; None before the first."""
    durations = [row.seconds for row in rows if row.status != "infeasible" and (row.seconds or 0) > 0]
    if not durations or left <= 0:
        return None
    return sum(durations) / len(durations) * left / max(1, running)


def trial_line(row: TrialRow, total: int) -> str:
    """Return a trial in a line.

    Example: 'trial 3 of 24  completed  batch_size 64  1,234 samples/s ± 2.1%  3.4 GiB  6.4 s'.
    """
    brief = "" if _has_interval(row) else " (measured too briefly for an interval)"
    loss = _value_text(row.validation_loss)
    metrics = [f"{name} {_value_text(value)}" for name, value in row.metrics.items()]
    parts = [
        f"trial {row.trial} of {total}",
        row.status.replace("_", " "),
        point_text(row.point),
        f"{throughput_text(row)} samples/s{brief}" if row.measured else "",
        f"validation loss {loss}" if loss else "",
        *metrics,
        _memory_text(row),
        _duration_text(row.seconds),
        row.reason,
    ]
    return "  ".join(part for part in parts if part)


def differing_settings(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings with different values among the points; all settings if there are none."""
    names = list(dict.fromkeys(name for point in points for name in point))
    differing = [name for name in names if len({value_text(point.get(name)) for point in points}) > 1]
    return differing or names


def point_text(point: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    shown = point if names is None else names
    return ", ".join(f"{name} {value_text(point[name])}" for name in shown if name in point)


def throughput_text(row: TrialRow) -> str:
    """Return '1,234 ± 2.1%'; '1,234 ± ?' if the trial was too short for an interval."""
    if not row.measured:
        return ""
    interval = f"{100 * (row.interval or 0):.1f}%" if _has_interval(row) else "?"
    return f"{speed_text(row.samples_per_second)} ± {interval}"


def _has_interval(row: TrialRow) -> bool:
    return row.interval is not None and math.isfinite(row.interval)


def _value_text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _memory_text(row: TrialRow) -> str:
    return bytes_text(row.peak_memory_bytes) if row.peak_memory_bytes else ""


def _duration_text(seconds: float) -> str:
    return seconds_text(seconds) if seconds > 0 else ""
