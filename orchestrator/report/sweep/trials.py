"""Facts of a single trial: the settings it ran with, its devices, its figures."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.record.events.decoding import finite
from orchestrator.record.files.ledger import SweepRecord, TrialRow

PLANNED = (
    "workers",
    "strategy",
    "precision",
    "compile",
    "batch_size",
    "accumulation_steps",
    "global_batch_size",
)
"""Settings that the plan fills in if the trial's point leaves them open."""

HOUR_SECONDS = 3600.0


def trial_settings(row: TrialRow) -> dict[str, Any]:
    """Return the settings a trial ran with: its point, overridden by the plan's choices."""
    planned = {name: value for name in PLANNED if (value := getattr(row, name)) is not None}
    settings = dict(row.point)
    if "strategy" in planned:
        # The point names the requested strategy, the plan the one that was used.
        settings.pop("parallel_strategy", None)
    settings |= planned
    factors = [settings.get(name) for name in ("workers", "batch_size", "accumulation_steps")]
    if "global_batch_size" not in settings and all(is_count(factor) for factor in factors):
        settings["global_batch_size"] = math.prod(factor for factor in factors if factor is not None)
    return settings


def num_devices(row: TrialRow) -> int | None:
    """Return the number of devices, one per worker; None if it is unknown."""
    workers = trial_settings(row).get("workers")
    return workers if is_count(workers) else None


def throughput(row: TrialRow) -> float | None:
    """Return the samples per second; None if they were not measured."""
    return row.samples_per_second or None


def predicted_hours(record: SweepRecord, row: TrialRow) -> float | None:
    """Return the hours that the whole training would take at the trial's throughput."""
    given = record.header.get("settings")
    settings = given if isinstance(given, dict) else {}
    epochs = (
        finite(row.point.get("epochs"))
        or finite(record.header.get("epochs"))
        or finite(settings.get("epochs"))
    )
    samples = finite(record.header.get("samples"))
    speed = throughput(row)
    if speed is None or not samples or not epochs or samples < 0 or epochs < 0:
        return None
    total_samples = samples * epochs
    max_steps = finite(settings.get("max_steps"))
    if max_steps is not None:
        total_samples = min(total_samples, max_steps * (row.global_batch_size or samples))
    return total_samples / speed / HOUR_SECONDS


def phase_shares(row: TrialRow) -> dict[str, float]:
    """Return the fraction of a step by phase; time outside all phases belongs to none."""
    step_seconds = max(sum(row.phases.values()), row.step_seconds or 0.0)
    return {name: value / step_seconds for name, value in row.phases.items()} if step_seconds else {}


def is_count(value: Any) -> bool:
    """Return whether a value is a positive integer that a table can hold; a damaged file may have any."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53
