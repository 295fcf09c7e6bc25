"""The trials and the scaling of a sweep as DataFrames, for notebooks and tables, and as CSV files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.sweep.space import point_key
from orchestrator.record.files.ledger import SweepRecord, TrialRow, read_sweep_record
from orchestrator.report.run.figures.frames import Frame, as_column
from orchestrator.report.sweep.facts import one_line, other_swept, series_label, setting_names, train_command
from orchestrator.report.sweep.scaling import ScalingSeries, all_series, best_by_devices
from orchestrator.report.sweep.trials import PLANNED, phase_shares, predicted_hours, trial_settings
from orchestrator.types import PHASES

if TYPE_CHECKING:
    from pandas import DataFrame

FIGURES = (
    "samples_per_second",
    "interval",
    "units_per_second",
    "unit",
    "step_seconds",
    "steps",
    "peak_memory_bytes",
    "train_loss",
    "validation_loss",
    "seconds",
    "start_seconds",
)


def read_sweep(folder: str | Path) -> DataFrame:
    """Return the trials of a sweep folder, one row per trial, indexed by the number of the trial::

        trials = orchestrator.read_sweep("results/sweep-digits")
        trials.groupby("workers")["samples_per_second"].max().plot()

    The columns are those of ``sweep.csv``: ``status`` and ``reason``; each setting, as the plan
    filled it in; the figures, such as ``samples_per_second``, ``step_seconds`` and
    ``peak_memory_bytes``; the task's validation metrics, such as ``validation_accuracy``; the
    seconds per step of each phase; ``predicted_hours`` of the whole training; ``device``; and
    ``point``, the settings as the sweep chose them. ``interval`` is half the width of the
    throughput's 95 % confidence interval, as a fraction of the throughput. A figure that was not
    measured is missing.
    """
    return trial_frame(read_sweep_record(Path(folder)))


def trial_frame(record: SweepRecord) -> Frame:
    """Return one row per trial: how it ended, its settings and its figures."""
    import pandas as pd

    swept = [name for name in setting_names(record) if name != "parallel_strategy"]
    names = list(dict.fromkeys([*swept, *PLANNED]))
    metrics = _metric_names(record)
    rows = [_trial_values(record, row, names, metrics) for row in record.rows]
    # A trial without values has all columns too, so a sweep without trials keeps them.
    columns = _trial_values(record, TrialRow(0, {}, "infeasible"), names, metrics)
    frame = pd.DataFrame({column: as_column([row[column] for row in rows]) for column in columns})
    frame.index = pd.Index([row.trial for row in record.rows], name="trial")
    return frame


def _metric_names(record: SweepRecord) -> list[str]:
    """Return the names of the validation metrics that some trial has, in the order of their first trial."""
    return list(dict.fromkeys(name for row in record.rows for name in row.metrics))


def _metric_values(row: TrialRow, metrics: Sequence[str]) -> dict[str, float | None]:
    return {f"validation_{name}": row.metrics.get(name) for name in metrics}


def _trial_values(
    record: SweepRecord, row: TrialRow, names: Sequence[str], metrics: Sequence[str]
) -> dict[str, Any]:
    settings = trial_settings(row)
    return {
        "status": row.status,
        "reason": row.reason,
        **{name: settings.get(name) for name in names},
        # Before the figures: a metric may have the name of one of them.
        **_metric_values(row, metrics),
        **{name: getattr(row, name) for name in FIGURES},
        **{f"{name}_seconds": row.phases.get(name) for name in PHASES},
        "predicted_hours": predicted_hours(record, row),
        "device": row.device,
        "point": point_key(row.point),
    }


def scaling_frame(record: SweepRecord) -> Frame:
    """Return one row per number of devices of each series: the comparison with the base, and the trial.

    ``scaling`` is the kind of the series (best, strong, weak), ``series`` its number and ``label``
    its name for people.
    """
    import pandas as pd

    settings = [*PLANNED[1:], *other_swept(record)]
    metrics = _metric_names(record)
    rows = {row.trial: row for row in record.rows}
    best = {row.trial for row in best_by_devices(record).values()}
    series = all_series(record)
    values = []
    for number, one in enumerate(series):
        common = {
            "scaling": one.kind,
            "series": number,
            "label": _label(one, series),
            "against_devices": one.base_devices,
        }
        for point in one.points.to_dict("records"):
            trial = point["trial"]
            # The settings come first: a damaged file may have one with the name of a column of
            # ours.
            ran_with = trial_settings(rows[trial])
            line = {name: ran_with.get(name) for name in settings}
            line |= _metric_values(rows[trial], metrics)
            line |= _scaling_figures(record, rows[trial], point)
            values.append(line | common | {"best_of_its_devices": trial in best})
    columns = _scaling_columns(settings, metrics)
    return pd.DataFrame({name: as_column([line[name] for line in values]) for name in columns})


def _scaling_columns(settings: Sequence[str], metrics: Sequence[str]) -> list[str]:
    columns = [
        *("scaling", "series", "label", "devices"),
        *settings,
        *("samples_per_second", "interval", "units_per_second", "unit"),
        *("speedup", "against_devices", "efficiency", "efficiency_interval", "peak_memory_bytes"),
        *(f"{name}_share" for name in PHASES),
        *("predicted_hours", "validation_loss"),
        *(f"validation_{name}" for name in metrics),
        *("best_of_its_devices", "trial", "command"),
    ]
    return list(dict.fromkeys(columns))


def _scaling_figures(record: SweepRecord, row: TrialRow, point: Mapping[Any, Any]) -> dict[str, Any]:
    shares = phase_shares(row)
    compared = (
        "trial",
        "devices",
        "samples_per_second",
        "interval",
        "speedup",
        "efficiency",
        "efficiency_interval",
    )
    return {
        **{name: _known(point[name]) for name in compared},
        "units_per_second": row.units_per_second,
        "unit": row.unit,
        "peak_memory_bytes": row.peak_memory_bytes,
        **{f"{name}_share": shares.get(name) for name in PHASES},
        "predicted_hours": predicted_hours(record, row),
        "validation_loss": row.validation_loss,
        "command": train_command(record, row),
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _label(series: ScalingSeries, among: Sequence[ScalingSeries]) -> str:
    if series.kind == "best":
        return "best of each number of devices"
    return series_label(series, [other for other in among if other.kind == series.kind])


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
