"""The tables of a sweep for programs: ``sweep.csv`` with every trial, ``scaling.csv`` with what scales how."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.space import point_key
from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.run.read import finite
from orchestrator.report.sweep.facts import (
    PHASES,
    one_line,
    other_swept,
    series_label,
    setting_names,
    train_command,
)
from orchestrator.report.sweep.scaling import (
    PLANNED,
    Scaled,
    best_by_devices,
    phase_shares,
    predicted_hours,
    scaled,
    series_of,
    settings_of,
)

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
_NOTHING = TrialRow(0, {}, "infeasible")
"""Has the columns of any row."""
_FORMULA = ("=", "+", "-", "@")
LONGEST = 4000
"""Characters of a text; the whole of it is in sweep.jsonl."""


@dataclass(frozen=True)
class Group:
    """Rows that are compared with the first of them: a series, or the best row of each number of devices."""

    kind: str
    label: str
    points: tuple[Scaled, ...]


def best_group(record: SweepRecord) -> Group:
    """The best row of each number of devices. They may differ in their settings: what one gains by more devices, each used well."""
    return Group("best", "best of each number of devices", scaled(best_by_devices(record).values()))


def groups(record: SweepRecord) -> list[Group]:
    """Everything that is compared over the number of devices: strong series, weak series, and the best."""
    found = [best_group(record)]
    for kind in ("strong", "weak"):
        series = series_of(record, kind)
        found += [Group(kind, series_label(one, series), one.points) for one in series]
    return [group for group in found if group.points]


def sweep_csv(record: SweepRecord) -> str:
    """One line for each trial: its settings (as the plan filled them in), its figures, its end, and the point as it was asked for."""
    names = [name for name in setting_names(record) if name != "parallel_strategy"]
    settings = list(dict.fromkeys([*names, *PLANNED]))
    return _csv(_trial(record, _NOTHING, settings), [_trial(record, row, settings) for row in record.rows])


def _trial(record: SweepRecord, row: TrialRow, settings: Iterable[str]) -> dict[str, Any]:
    ran = settings_of(row)
    phases = {f"{name}_seconds": finite(row.phases.get(name)) for name in PHASES}
    return {
        "trial": row.trial,
        "status": row.status,
        "reason": row.reason,
        **{name: ran.get(name) for name in settings},
        **{name: getattr(row, name) for name in FIGURES},
        **phases,
        "predicted_hours": predicted_hours(record, row),
        "device": row.device,
        "point": point_key(row.point),
    }


def scaling_csv(record: SweepRecord) -> str:
    """One line for each row of each series, and for the best of each number of devices."""
    best = {row.trial for row in best_by_devices(record).values()}
    lines = [
        _scaled_line(record, group, number, point, point.row.trial in best)
        for number, group in enumerate(groups(record))
        for point in group.points
    ]
    nothing = Scaled(_NOTHING, 1, 1.0, 1.0, None)
    return _csv(_scaled_line(record, Group("", "", (nothing,)), 0, nothing, False), lines)


def _scaled_line(record: SweepRecord, group: Group, number: int, point: Scaled, best: bool) -> dict[str, Any]:
    row, ran, shares = point.row, settings_of(point.row), phase_shares(point.row)
    return {
        "scaling": group.kind,
        "series": number,
        "devices": point.devices,
        **{name: ran.get(name) for name in dict.fromkeys([*PLANNED[1:], *other_swept(record)])},
        **{
            name: getattr(row, name)
            for name in ("samples_per_second", "interval", "units_per_second", "unit")
        },
        "speedup": point.speedup,
        "against_devices": group.points[0].devices,
        "efficiency": point.efficiency,
        "efficiency_interval": point.uncertainty,
        "peak_memory_bytes": row.peak_memory_bytes,
        **{f"{name}_share": shares.get(name) for name in PHASES},
        "predicted_hours": predicted_hours(record, row),
        "validation_loss": row.validation_loss,
        "best_of_its_devices": best,
        "trial": row.trial,
        "command": train_command(record, row),
    }


def _csv(names: Iterable[str], lines: Iterable[Mapping[str, Any]]) -> str:
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(_cell(name) for name in names)
    writer.writerows([_cell(value) for value in line.values()] for line in lines)
    return target.getvalue()


def _cell(value: Any) -> Any:
    """One line of text, and kept from a spreadsheet that would take it for a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, int | float):
        return value
    text = one_line(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value), LONGEST)
    return f"'{text}" if text.startswith(_FORMULA) else text
