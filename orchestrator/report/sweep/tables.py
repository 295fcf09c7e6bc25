"""HTML tables of a sweep: scaling, and every trial with sorting and filtering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.config.sweep.objective import THROUGHPUT, VALIDATION_LOSS
from orchestrator.record.events.decoding import finite
from orchestrator.record.files.ledger import STATUSES, SweepRecord, TrialRow
from orchestrator.report.draw.html import (
    esc,
    folded,
    header_cell,
    part_color,
    search_box,
    table,
)
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep import facts
from orchestrator.report.sweep.facts import STATUS_WORDS
from orchestrator.report.sweep.frames import scaling_frame
from orchestrator.report.sweep.heatmap import is_number
from orchestrator.report.sweep.scaling_text import (
    PHASES_COLUMN,
    SCALING_SETTINGS,
    UNKNOWN,
    against_text,
    memory_text,
    phases_text,
    scaling_texts,
)
from orchestrator.report.sweep.trials import (
    num_devices,
    phase_shares,
    predicted_hours,
    throughput,
    trial_settings,
)
from orchestrator.types import PHASES, seconds_text, speed_text

MAX_SERIES = 12
MAX_TRIALS = 2000
MAX_OPEN_ROWS = 20
"""Rows of a scaling table that is shown unfolded."""
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
_TEXT_COLUMNS = {"strategy", "precision", PHASES_COLUMN}
_BEST = ' class="best"'


def scaling_tables(record: SweepRecord) -> str:
    frame = scaling_frame(record)
    return "".join(_scaling_table(record, kind, frame[frame["scaling"] == kind]) for kind in _TITLES)


def _scaling_table(record: SweepRecord, kind: str, points: Frame) -> str:
    # One row compares nothing: it stands in the tiles and in the table of trials.
    if len(points) < 2:
        return ""
    rows = {row.trial: row for row in record.rows}
    numbers = points["series"].unique()
    shown = points[points["series"].isin(numbers[:MAX_SERIES])]
    texts = scaling_texts(record, shown)
    common = _common_settings(record, texts)
    texts = texts.drop(columns=list(common))
    head = "".join(header_cell(_short(name), name not in _TEXT_COLUMNS) for name in texts)
    body = []
    # Series are numbered from the fastest on, and stay in that order.
    for _, series in shown.groupby("series", sort=False):
        if kind != "best":
            body.append(_label_row(series["label"].iloc[0], len(texts.columns)))
        for place, point in series.iterrows():
            is_marked = kind != "best" and bool(point["best_of_its_devices"])
            body.append(_scaling_row(rows[point["trial"]], texts.loc[place].to_dict(), is_marked))
    cut = f", the {MAX_SERIES} fastest of {len(numbers)} series" if len(numbers) > MAX_SERIES else ""
    alike = "".join(f"; {name} {value}" for name, value in common.items())
    remark = f"against {against_text(points)}{cut}{alike}"
    keys = _phase_keys([rows[trial] for trial in points["trial"]])
    shown = table(_TITLES[kind], head, "".join(body), "dense") + keys
    return folded(_TITLES[kind], remark, shown, is_open=len(points) <= MAX_OPEN_ROWS)


def _common_settings(record: SweepRecord, texts: Frame) -> dict[str, str]:
    """Return the settings that are the same in all rows: they need no columns."""
    names = [facts.name_text(name) for name in (*SCALING_SETTINGS, *facts.other_swept(record))]
    return {name: texts[name].iloc[0] for name in names if texts[name].nunique() == 1}


def _short(name: str) -> str:
    return "step" if name == PHASES_COLUMN else name.replace("accumulation", "accum.")


def _label_row(label: str, num_columns: int) -> str:
    return f'<tr class="plain"><td colspan="{num_columns}">{esc(label)}</td></tr>'


def _scaling_row(row: TrialRow, texts: Mapping[Any, str], is_marked: bool) -> str:
    cells = [
        f"<td>{phase_bar(row)}</td>"
        if name == PHASES_COLUMN
        else f"<td{_class(name not in _TEXT_COLUMNS)}>{esc(text)}</td>"
        for name, text in texts.items()
    ]
    return f"<tr{_BEST if is_marked else ''}>{''.join(cells)}</tr>"


def phase_bar(row: TrialRow) -> str:
    """Return a bar that divides a step into its phases."""
    shares = phase_shares(row)
    if not shares:
        return UNKNOWN
    parts = "".join(
        f'<i style="{part_color(name)};flex:{shares[name]:.4f}"></i>' for name in PHASES if shares.get(name)
    )
    rest = max(0.0, 1 - sum(shares.values()))
    description = esc(f"{' / '.join(PHASES)}: {phases_text(shares)} %")
    return (
        f'<div class="stack" role="img" aria-label="{description}" title="{description}">{parts}'
        f'<i style="--c:var(--fill);flex:{rest:.4f}"></i></div>'
    )


def _phase_keys(rows: Sequence[TrialRow]) -> str:
    used = {name for row in rows for name in phase_shares(row)}
    keys = "".join(
        f'<span class="key" style="{part_color(name)}">{name}</span>' for name in PHASES if name in used
    )
    return f'<div class="parts">{keys}</div>' if keys else ""


@dataclass(frozen=True)
class _Column:
    """A column of the trials: the text of each trial, and the value that it is sorted by."""

    name: str
    text: Callable[[TrialRow], str]
    value: Callable[[TrialRow], Any]
    first_order: str = "ascending"
    is_figure: bool = True
    is_measured: bool = False
    """Whether a trial that was not measured has a dash here."""


_STATUS = _Column(
    "status",
    text=lambda row: STATUS_WORDS[row.status],
    value=lambda row: STATUSES.index(row.status),
    is_figure=False,
)


def trials_table(record: SweepRecord) -> str:
    """Return every trial: the completed from the best to the worst, then the others with their reasons."""
    best = record.ranked()
    ranked = {row.trial for row in best}
    others = [row for row in record.rows if row.trial not in ranked]
    rows = [*best, *sorted(others, key=lambda row: (STATUSES.index(row.status), row.trial))]
    if not rows:
        return ""
    columns = _columns(record)
    head = "".join(
        f'<th scope="col"{_class(column.is_figure)} data-first="{column.first_order}">{esc(column.name)}</th>'
        for column in columns
    )
    body = [_trial_row(row, columns, bool(best) and row is best[0]) for row in rows[:MAX_TRIALS]]
    cut = f", {MAX_TRIALS} shown, all in sweep.csv" if len(rows) > MAX_TRIALS else ""
    search = search_box("Filter by words of a row; click a column to sort", "Filter trials")
    shown = table("Trials", head, "".join(body), "dense sortable")
    return folded("Trials", f"{len(rows)}{cut}", search + shown, is_open=True)


def _columns(record: SweepRecord) -> list[_Column]:
    names = facts.setting_names(record)
    columns = [_figure("#", lambda row: row.trial, _integer), _STATUS]
    columns += [_setting_column(name, record) for name in names]
    if "workers" not in names:
        columns.append(_figure("devices", num_devices, _integer))
    if any(row.validation_loss is not None for row in record.rows):
        columns.append(_measured("validation loss", lambda row: row.validation_loss, "{:.4g}".format))
    if record.objective not in (THROUGHPUT, VALIDATION_LOSS):
        value = partial(facts.objective_value, record)
        columns.append(_measured(facts.objective_name(record), value, "{:.4g}".format))
    columns += [
        replace(_measured("samples/s", throughput, speed_text), first_order="descending"),
        _measured("± %", _interval_percent, "{:.1f}".format),
        _measured("step", lambda row: row.step_seconds, seconds_text),
        _measured("memory", lambda row: row.peak_memory_bytes, memory_text),
        _measured("whole run", lambda row: predicted_hours(record, row), facts.hours_text),
        _figure("cost", lambda row: row.seconds or None, seconds_text),
    ]
    return columns


def _integer(value: float) -> str:
    return f"{value:g}"


def _interval_percent(row: TrialRow) -> float | None:
    interval = row.interval
    return None if interval is None else 100 * interval


def _setting_column(name: str, record: SweepRecord) -> _Column:
    def text(row: TrialRow) -> str:
        return facts.setting_text(row, name)

    def value(row: TrialRow) -> Any:
        used = trial_settings(row).get(name, row.point.get(name))
        return used if is_number(used) else text(row)

    has_numbers = any(is_number(row.point.get(name)) for row in record.rows)
    return _Column(facts.name_text(name), text, value, is_figure=has_numbers)


def _figure(name: str, figure: Callable[[TrialRow], Any], text: Callable[[float], str]) -> _Column:
    """Return a column of figures; a missing one is shown as a dash and sorted to the end in both orders."""

    def shown(row: TrialRow) -> str:
        value = finite(figure(row))
        return UNKNOWN if value is None else text(value)

    def sorted_by(row: TrialRow) -> Any:
        value = finite(figure(row))
        return "" if value is None else value

    return _Column(name, shown, sorted_by)


def _measured(name: str, figure: Callable[[TrialRow], Any], text: Callable[[float], str]) -> _Column:
    return replace(_figure(name, figure, text), is_measured=True)


def _trial_row(row: TrialRow, columns: Sequence[_Column], is_best: bool) -> str:
    is_blank = all(column.value(row) == "" for column in columns if column.is_measured)
    if row.reason and is_blank:
        cells = _cells_with_reason(row, columns)
    else:
        cells = "".join(_trial_cell(row, column) for column in columns)
    return f"<tr{_BEST if is_best else ''}>{cells}</tr>"


def _trial_cell(row: TrialRow, column: _Column) -> str:
    shown = esc(column.text(row))
    if column is _STATUS:
        reason = f' title="{esc(facts.one_line(row.reason))}"' if row.reason else ""
        shown = f'<span class="end-of t-{TONES[row.status]}"{reason}>{shown}</span>'
    return f'<td{_class(column.is_figure)} data-value="{esc(column.value(row))}">{shown}</td>'


def _cells_with_reason(row: TrialRow, columns: Sequence[_Column]) -> str:
    """Return the cells of a trial that was not measured, with its reason across the columns of its figures.

    The covered cells stay, hidden: the script sorts columns by the index of a cell.
    """
    covered = [column for column in columns if column.is_measured]
    reason = f'<td class="wrap" colspan="{len(covered)}" data-value="">{esc(facts.one_line(row.reason))}</td>'
    cells = []
    for column in columns:
        if column is covered[0]:
            cells.append(reason + '<td hidden data-value=""></td>' * (len(covered) - 1))
        elif not column.is_measured:
            cells.append(_trial_cell(row, column))
    return "".join(cells)


def _class(is_figure: bool) -> str:
    return ' class="figure"' if is_figure else ""
