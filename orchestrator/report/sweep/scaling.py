"""How throughput grows with the number of devices: the mathematics alone, over the rows of a sweep.

Weak scaling: every device keeps its batch, so the global batch grows with the devices. Strong scaling: the global batch stays,
and each device gets less of it. A row may be part of a weak and of a strong series; two rows never share both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.config.space import point_key
from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.run.read import finite

Kind = Literal["strong", "weak"]
Settings = Mapping[str, Any]

PLANNED = (
    "workers",
    "strategy",
    "precision",
    "compile",
    "batch_size",
    "accumulation_steps",
    "global_batch_size",
)
"""Settings that a plan fills in where the trial's point leaves them open."""
_FREE: Mapping[Kind, set[str]] = {
    "weak": {"workers", "strategy", "global_batch_size"},
    "strong": {"workers", "strategy", "batch_size", "accumulation_steps"},
}
_FIXED: Mapping[Kind, tuple[str, ...]] = {
    "weak": ("batch_size", "accumulation_steps"),
    "strong": ("global_batch_size",),
}
ALONE = "single"
HOUR = 3600.0


@dataclass(frozen=True)
class Scaled:
    """A row against the base of its series."""

    row: TrialRow
    devices: int
    speedup: float
    """Its throughput over the base's."""
    efficiency: float
    """Its throughput per device over the base's."""
    uncertainty: float | None
    """Half the width of the 95 % interval of the efficiency; None where an interval is missing."""


@dataclass(frozen=True)
class Series:
    """Rows of the same settings on two or more numbers of devices, by the number; the first is the base."""

    kind: Kind
    settings: Settings
    points: tuple[Scaled, ...]

    @property
    def base_devices(self) -> int:
        return self.points[0].devices

    @property
    def peak(self) -> float:
        return max(speed_of(point.row) or 0.0 for point in self.points)


def settings_of(row: TrialRow) -> dict[str, Any]:
    """What a trial ran with: its point, and over it what the plan made of it."""
    filled = {name: value for name in PLANNED if (value := getattr(row, name)) is not None}
    kept = {
        name: value
        for name, value in row.point.items()
        if not (name == "parallel_strategy" and "strategy" in filled)
    }
    settings = kept | filled
    parts = [settings.get(name) for name in ("workers", "batch_size", "accumulation_steps")]
    if "global_batch_size" not in settings and all(_is_count(part) for part in parts):
        settings["global_batch_size"] = math.prod(part for part in parts if part is not None)
    return settings


def devices_of(row: TrialRow) -> int | None:
    """One device for each worker."""
    workers = settings_of(row).get("workers")
    return workers if _is_count(workers) else None


def speed_of(row: TrialRow) -> float | None:
    """Samples per second; None where none were measured."""
    speed = finite(row.samples_per_second)
    return speed if speed is not None and speed > 0 else None


def interval_of(row: TrialRow) -> float | None:
    """The relative half-width of the interval of the throughput."""
    interval = finite(row.interval)
    return interval if interval is not None and interval >= 0 else None


def score_of(row: TrialRow, objective: str) -> float | None:
    """The larger the better; None for what did not complete or has no finite score."""
    return finite(row.score(objective)) if row.status == "completed" else None


def ranked(record: SweepRecord) -> list[TrialRow]:
    """Completed trials, the best first; of equals the earlier."""
    scored = [
        (score, -row.trial, row)
        for row in record.rows
        if (score := score_of(row, record.objective)) is not None
    ]
    return [row for *_, row in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def best_by_devices(record: SweepRecord) -> dict[int, TrialRow]:
    """The best completed trial of each number of devices, by the objective."""
    found: dict[int, TrialRow] = {}
    for row in ranked(record):
        if (devices := devices_of(row)) is not None:
            found.setdefault(devices, row)
    return dict(sorted(found.items()))


def scaled(rows: Iterable[TrialRow]) -> tuple[Scaled, ...]:
    """Rows against the one with the fewest devices. Of several on as many devices the fastest counts; those without a throughput or
    a number of devices do not."""
    fastest: dict[int, TrialRow] = {}
    for row in sorted(rows, key=lambda row: (-(speed_of(row) or 0.0), row.trial)):
        if (devices := devices_of(row)) is not None and speed_of(row) is not None:
            fastest.setdefault(devices, row)
    counts = sorted(fastest)
    return tuple(_against(fastest[counts[0]], counts[0], fastest[count], count) for count in counts)


def _against(base: TrialRow, base_devices: int, row: TrialRow, devices: int) -> Scaled:
    speedup = (speed_of(row) or 0.0) / (speed_of(base) or 1.0)
    efficiency = speedup * base_devices / devices
    if row is base:
        return Scaled(row, devices, 1.0, 1.0, None)
    parts = (interval_of(row), interval_of(base))
    # Independent measurements: relative errors of a quotient add in squares.
    uncertainty = (
        None if parts[0] is None or parts[1] is None else efficiency * math.hypot(parts[0], parts[1])
    )
    return Scaled(row, devices, speedup, efficiency, uncertainty)


def series_of(record: SweepRecord, kind: Kind) -> list[Series]:
    """All series of a kind, the fastest first."""
    completed = [
        row
        for row in record.rows
        if row.status == "completed" and speed_of(row) is not None and _is_fixed(row, kind)
    ]
    groups = _grouped(completed, lambda row: point_key(_shared(row, kind)))
    found = [_series(kind, rows) for group in groups for rows in _by_strategy(group)]
    return sorted((series for series in found if len(series.points) > 1), key=lambda series: -series.peak)


def all_series(record: SweepRecord) -> list[Series]:
    return [*series_of(record, "strong"), *series_of(record, "weak")]


def _is_fixed(row: TrialRow, kind: Kind) -> bool:
    """Whether a row can be of a series: what the kind keeps is known, and in weak scaling the global batch grows with the devices
    (it does not where one gate routes for all)."""
    settings = settings_of(row)
    if not all(_is_count(settings.get(name)) for name in _FIXED[kind]):
        return False
    whole = settings.get("global_batch_size")
    return kind == "strong" or whole in (
        None,
        settings["batch_size"] * settings["accumulation_steps"] * (devices_of(row) or 1),
    )


def _shared(row: TrialRow, kind: Kind) -> dict[str, Any]:
    return {name: value for name, value in settings_of(row).items() if name not in _FREE[kind]}


def _series(kind: Kind, rows: Sequence[TrialRow]) -> Series:
    points = scaled(rows)
    strategy = next((row.strategy for row in rows if row.strategy not in (ALONE, None)), None)
    return Series(kind, _shared(rows[0], kind) | ({"strategy": strategy} if strategy else {}), points)


def _by_strategy(rows: Sequence[TrialRow]) -> list[list[TrialRow]]:
    """One list for each strategy. A process alone has none: it is the beginning of every one of them."""
    strategies = {row.strategy: None for row in rows if row.strategy != ALONE}
    alone = [row for row in rows if row.strategy == ALONE]
    return [[*alone, *(row for row in rows if row.strategy == strategy)] for strategy in strategies]


def _grouped(rows: Iterable[TrialRow], key: Callable[[TrialRow], str]) -> list[list[TrialRow]]:
    groups: dict[str, list[TrialRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def predicted_hours(record: SweepRecord, row: TrialRow) -> float | None:
    """Hours that the whole training would take at the row's throughput."""
    given = record.header.get("settings")
    epochs = finite(row.point.get("epochs")) or finite(record.header.get("epochs"))
    samples, speed = finite(record.header.get("samples")), speed_of(row)
    if isinstance(given, dict) and epochs is None:
        epochs = finite(given.get("epochs"))
    if speed is None or not samples or not epochs or samples < 0 or epochs < 0:
        return None
    most = finite(given.get("max_steps")) if isinstance(given, dict) else None
    whole = (
        samples * epochs if most is None else min(samples * epochs, most * (row.global_batch_size or samples))
    )
    return whole / speed / HOUR


def phase_shares(row: TrialRow) -> dict[str, float]:
    """Parts of a step by phase. What no phase accounts for belongs to none."""
    phases = {
        str(name): part
        for name, value in row.phases.items()
        if (part := finite(value)) is not None and part >= 0
    }
    whole = max(sum(phases.values()), finite(row.step_seconds) or 0.0)
    return {name: part / whole for name, part in phases.items()} if whole > 0 else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
