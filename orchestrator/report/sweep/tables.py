"""The tables of a sweep on its page: what scales how, and every trial, to be sorted and filtered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.record.ledger import STATUSES, TrialRow, SweepRecord
from orchestrator.report.run.read import finite
from orchestrator.report.run.svg import PART_COLORS, esc
from orchestrator.report.sweep.csv_files import Group, groups
from orchestrator.report.sweep.facts import (
    PHASES,
    WORDS,
    hours_text,
    in_words,
    one_line,
    point_text,
    setting_names,
    speed_text,
)
from orchestrator.report.sweep.heatmap import is_number
from orchestrator.report.sweep.markdown import (
    against_text,
    memory_text,
    phases_text,
    scaling_cells,
    scaling_names,
)
from orchestrator.report.sweep.scaling import (
    Scaled,
    best_by_devices,
    devices_of,
    interval_of,
    phase_shares,
    predicted_hours,
    ranked,
    settings_of,
    speed_of,
)
from orchestrator.types import seconds_text

MOST_SERIES = 12
MOST_TRIALS = 2000
MOST_OPEN = 20
"""Rows of a scaling table that is shown without being asked for."""
TONES = {
    "completed": "good",
    "stopped": "calm",
    "failed": "bad",
    "out_of_memory": "bad",
    "infeasible": "warn",
}
_TITLES = {
    "best": "Best setting of each number of devices",
    "strong": "Strong scaling",
    "weak": "Weak scaling",
}
_WORDY = {"strategy", "precision", f"{' / '.join(PHASES)}, %"}
_BEST = ' class="best"'


def scaling_tables(record: SweepRecord) -> str:
    found = groups(record)
    return "".join(
        _scaling_table(record, kind, [group for group in found if group.kind == kind]) for kind in _TITLES
    )


def _scaling_table(record: SweepRecord, kind: str, found: Sequence[Group]) -> str:
    if not found:
        return ""
    best = {row.trial for row in best_by_devices(record).values()} if kind != "best" else set()
    names = scaling_names(record)
    head = "".join(f'<th scope="col"{_class(name not in _WORDY)}>{esc(_short(name))}</th>' for name in names)
    body = "".join(_scaling_rows(record, group, best, names) for group in found[:MOST_SERIES])
    cut = f", the {MOST_SERIES} fastest of {len(found)} series" if len(found) > MOST_SERIES else ""
    aside = f"<small>against {esc(against_text(found))}{cut}</small>"
    table = f'<div class="scroll"><table class="dense"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    shown = " open" if sum(len(group.points) for group in found) <= MOST_OPEN else ""
    return f'<details class="card"{shown}><summary>{_TITLES[kind]} {aside}</summary>{table}{_phase_keys(found)}</details>'


def _short(name: str) -> str:
    return "step" if name.startswith(PHASES[0]) else name.replace("accumulation", "accum.")


def _scaling_rows(record: SweepRecord, group: Group, best: set[int], names: Sequence[str]) -> str:
    cells = zip(group.points, (scaling_cells(record, group, point) for point in group.points), strict=True)
    label = (
        f'<tr class="plain"><td colspan="{len(names)}">{esc(group.label)}</td></tr>'
        if group.kind != "best"
        else ""
    )
    return label + "".join(_scaling_row(point, line, names, point.row.trial in best) for point, line in cells)


def _scaling_row(point: Scaled, line: Sequence[str], names: Sequence[str], best: bool) -> str:
    cells = "".join(
        f"<td>{phase_stack(point.row)}</td>"
        if name.startswith(PHASES[0])
        else f"<td{_class(name not in _WORDY)}>{esc(cell)}</td>"
        for name, cell in zip(names, line, strict=True)
    )
    return f"<tr{_BEST if best else ''}>{cells}</tr>"


def phase_stack(row: TrialRow) -> str:
    """A step cut into its phases."""
    shares = phase_shares(row)
    if not shares:
        return "–"
    parts = "".join(
        f'<i style="--c:var(--c{PART_COLORS.get(name, 5)});flex:{shares[name]:.4f}"></i>'
        for name in PHASES
        if shares.get(name)
    )
    rest = max(0.0, 1 - sum(shares.values()))
    about = esc(f"{' / '.join(PHASES)}: {phases_text(row)} %")
    return f'<div class="stack" role="img" aria-label="{about}" title="{about}">{parts}<i style="--c:var(--fill);flex:{rest:.4f}"></i></div>'


def _phase_keys(found: Sequence[Group]) -> str:
    used = {name for group in found for point in group.points for name in phase_shares(point.row)}
    keys = "".join(
        f'<span class="key" style="--c:var(--c{PART_COLORS.get(name, 5)})">{name}</span>'
        for name in PHASES
        if name in used
    )
    return f'<div class="parts">{keys}</div>' if keys else ""


@dataclass(frozen=True)
class _Column:
    """A column of the trials: its name, the text of a row, and what it is sorted by (the text where it is None)."""

    name: str
    text: Callable[[TrialRow], str]
    value: Callable[[TrialRow], Any] | None = None
    first: str = "ascending"
    figure: bool = True
    measured: bool = False
    """Whether it is a dash in the row of a trial that was not measured."""


def trials_table(record: SweepRecord) -> str:
    """Every trial: the completed from the best to the worst, then the others with why."""
    best = ranked(record)
    placed = {row.trial for row in best}
    rest = sorted(
        (row for row in record.rows if row.trial not in placed),
        key=lambda row: (STATUSES.index(row.status), row.trial),
    )
    rows, columns = [*best, *rest], _columns(record)
    head = "".join(
        f'<th scope="col"{_class(column.figure)} data-first="{column.first}">{esc(column.name)}</th>'
        for column in columns
    )
    body = "".join(_trial(row, columns, bool(best) and row is best[0]) for row in rows[:MOST_TRIALS])
    cut = f", {MOST_TRIALS} shown, all in sweep.csv" if len(rows) > MOST_TRIALS else ""
    box = '<input class="filter" type="search" placeholder="Filter by words of a row; click a column to sort" aria-label="Filter trials">'
    table = f'<div class="scroll"><table class="dense sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return (
        f'<details class="card" open><summary>Trials <small>{len(rows)}{cut}</small></summary>{box}{table}</details>'
        if rows
        else ""
    )


def _columns(record: SweepRecord) -> list[_Column]:
    names = setting_names(record)
    settings = [_setting(name, record) for name in names]
    devices = [] if "workers" in names else [_number("devices", devices_of, lambda value: f"{value:g}")]
    losses = (
        [_number("validation loss", lambda row: row.validation_loss, lambda value: f"{value:.4g}")]
        if _any_loss(record)
        else []
    )
    figures = [
        *losses,
        _number("samples/s", speed_of, speed_text, "descending"),
        _number(
            "± %",
            lambda row: 100 * part if (part := interval_of(row)) is not None else None,
            lambda value: f"{value:.1f}",
        ),
        _number("step", lambda row: row.step_seconds, seconds_text),
        _number("memory", lambda row: row.peak_memory_bytes, lambda value: _memory(value)),
        _number("whole run", lambda row: predicted_hours(record, row), hours_text),
    ]
    cost = _number("cost", lambda row: row.seconds or None, seconds_text)
    number = _number("#", lambda row: row.trial, lambda value: f"{value:g}")
    return [
        number,
        _STATUS,
        *settings,
        *devices,
        *(replace(column, measured=True) for column in figures),
        cost,
    ]


def _memory(value: float) -> str:
    return memory_text(TrialRow(0, {}, "completed", peak_memory_bytes=int(value)))


_STATUS = _Column(
    "status", lambda row: WORDS[row.status], lambda row: STATUSES.index(row.status), figure=False
)


def _setting(name: str, record: SweepRecord) -> _Column:
    def value(row: TrialRow) -> Any:
        ran = settings_of(row).get(name, row.point.get(name))
        return ran if is_number(ran) else point_text(row, name)

    figure = any(is_number(row.point.get(name)) for row in record.rows)
    return _Column(in_words(name), lambda row: point_text(row, name), value, figure=figure)


def _number(
    name: str, value: Callable[[TrialRow], Any], text: Callable[[float], str], first: str = "ascending"
) -> _Column:
    """A column of figures; what is none is shown as a dash and stays at the end however one sorts."""

    def known(row: TrialRow) -> float | None:
        return finite(value(row))

    return _Column(
        name,
        lambda row: text(found) if (found := known(row)) is not None else "–",
        lambda row: _blank(known(row)),
        first,
    )


def _blank(value: float | None) -> Any:
    return "" if value is None else value


def _any_loss(record: SweepRecord) -> bool:
    return any(finite(row.validation_loss) is not None for row in record.rows)


def _trial(row: TrialRow, columns: Sequence[_Column], best: bool) -> str:
    blank = bool(row.reason) and all(
        column.value is None or column.value(row) == "" for column in columns if column.measured
    )
    cells = _with_reason(row, columns) if blank else "".join(_trial_cell(row, column) for column in columns)
    return f"<tr{_BEST if best else ''}>{cells}</tr>"


def _trial_cell(row: TrialRow, column: _Column) -> str:
    text, value = column.text(row), column.value(row) if column.value else column.text(row)
    about = f' title="{esc(one_line(row.reason))}"' if row.reason else ""
    shown = (
        f'<span class="end-of t-{TONES[row.status]}"{about}>{esc(text)}</span>'
        if column is _STATUS
        else esc(text)
    )
    return f'<td{_class(column.figure)} data-value="{esc(value)}">{shown}</td>'


def _with_reason(row: TrialRow, columns: Sequence[_Column]) -> str:
    """A trial that was not measured: why, across the columns of its figures, where it has room and is seen. The cells that it covers
    stay, hidden: columns are sorted by the number of a cell."""
    covered = [column for column in columns if column.measured]
    why = f'<td class="wrap" colspan="{len(covered)}" data-value="">{esc(one_line(row.reason))}</td>'
    hidden = why + '<td hidden data-value=""></td>' * (len(covered) - 1)
    return "".join(
        hidden if column is covered[0] else "" if column.measured else _trial_cell(row, column)
        for column in columns
    )


def _class(figure: bool) -> str:
    return ' class="figure"' if figure else ""
