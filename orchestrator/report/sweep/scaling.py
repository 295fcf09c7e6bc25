"""Scaling of the throughput with the number of devices.

Weak scaling: every device keeps its batch, so the global batch grows with the devices. Strong
scaling: the global batch stays, and each device gets less of it. A trial may be part of a weak and
of a strong series; two trials never share both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.config.sweep.space import point_key
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep.trials import (
    is_count,
    num_devices,
    throughput,
    trial_settings,
)

Kind = Literal["best", "strong", "weak"]
Settings = Mapping[str, Any]

SINGLE = "single"

_VARYING: Mapping[str, set[str]] = {
    "weak": {"workers", "strategy", "global_batch_size"},
    "strong": {"workers", "strategy", "batch_size", "accumulation_steps"},
}
_FIXED: Mapping[str, tuple[str, ...]] = {
    "weak": ("batch_size", "accumulation_steps"),
    "strong": ("global_batch_size",),
}


@dataclass(frozen=True)
class ScalingSeries:
    """Trials on different numbers of devices, compared with the one on the fewest: the base.

    In a strong or weak series all have the same ``settings``. In the series ``best`` each is the
    best trial of its number of devices, so their settings may differ.
    """

    kind: Kind
    settings: Settings
    points: Frame
    """One row per number of devices, in ascending order, with the columns ``trial``, ``devices``,
    ``samples_per_second``, ``interval`` (fraction of the throughput), ``speedup`` over the base,
    ``efficiency`` (speed-up per device) and ``efficiency_interval`` (half the width of its 95 %
    interval; missing for the base and without intervals).
    """

    @property
    def base_devices(self) -> int:
        return int(self.points["devices"].iloc[0])

    @property
    def max_devices(self) -> int:
        return int(self.points["devices"].iloc[-1])

    @property
    def peak(self) -> float:
        return float(self.points["samples_per_second"].max())


def best_by_devices(record: SweepRecord) -> dict[int, TrialRow]:
    """Return the best completed trial of each number of devices, by the objective."""
    import pandas as pd

    ranked = record.ranked()
    devices: Frame = pd.Series([num_devices(row) for row in ranked], dtype="Int64").dropna()
    best = devices.drop_duplicates().sort_values()
    return {int(count): ranked[int(place)] for place, count in best.items()}


def best_series(record: SweepRecord) -> ScalingSeries | None:
    """Return the comparison of the best trials of each number of devices; None without a measured one.

    It shows the gain of more devices if each number of devices is used well.
    """
    best = [row.trial for row in best_by_devices(record).values()]
    measured = measured_trials(record)
    points = measured[measured["trial"].isin(best)]
    return ScalingSeries("best", {}, compare(points)) if len(points) else None


def series_of(record: SweepRecord, kind: Kind) -> list[ScalingSeries]:
    """Return the strong or the weak series, the fastest first."""
    rows = {row.trial: row for row in record.rows}
    trials = measured_trials(record)
    trials = trials[trials["trial"].map(lambda trial: _can_scale(rows[trial], kind)).astype(bool)]
    shared_keys = trials["trial"].map(lambda trial: point_key(_shared_settings(rows[trial], kind)))
    # Most groups of a random search are single trials. They are dropped before the loop, which is
    # slow.
    num_counts = trials.groupby(shared_keys)["devices"].transform("nunique")
    trials = trials[num_counts > 1]
    series = []
    for _, group in trials.groupby(shared_keys, sort=False):
        shared = _shared_settings(rows[group["trial"].iloc[0]], kind)
        # A single process has no strategy of its own: it is the base of every strategy.
        is_single = group["strategy"] == SINGLE
        for strategy in group.loc[~is_single, "strategy"].unique():
            points = compare(group[is_single | (group["strategy"] == strategy)])
            settings = shared | ({"strategy": strategy} if strategy else {})
            if len(points) > 1:
                series.append(ScalingSeries(kind, settings, points))
    return sorted(series, key=lambda one: -one.peak)


def all_series(record: SweepRecord) -> list[ScalingSeries]:
    """Return every comparison over the number of devices: the best trials, strong and weak series."""
    best = best_series(record)
    return [*([best] if best else []), *series_of(record, "strong"), *series_of(record, "weak")]


def measured_trials(record: SweepRecord) -> Frame:
    """Return the completed trials with a throughput and a known number of devices."""
    import pandas as pd

    trials: Frame = pd.DataFrame(
        {
            "trial": [row.trial for row in record.rows],
            "status": [row.status for row in record.rows],
            "devices": pd.array([num_devices(row) for row in record.rows], dtype="Int64"),
            "strategy": [row.strategy or "" for row in record.rows],
            "samples_per_second": pd.array([throughput(row) for row in record.rows], dtype="Float64"),
            "interval": pd.Series([row.interval for row in record.rows], dtype="float64"),
        }
    )
    completed = trials[trials["status"] == "completed"].drop(columns="status")
    known = completed.dropna(subset=["devices", "samples_per_second"])
    return known.astype({"devices": "int64", "samples_per_second": "float64"})


def compare(trials: Frame) -> Frame:
    """Return the fastest trial of each number of devices, compared with the one on the fewest."""
    import numpy as np

    fastest_first = trials.sort_values(["samples_per_second", "trial"], ascending=[False, True])
    points = fastest_first.drop_duplicates("devices").sort_values("devices", ignore_index=True)
    base = points.iloc[0]
    points["speedup"] = points["samples_per_second"] / base["samples_per_second"]
    points["efficiency"] = points["speedup"] * base["devices"] / points["devices"]
    # The measurements are independent, so relative errors of a quotient add in squares.
    relative_error = np.hypot(points["interval"], base["interval"])
    points["efficiency_interval"] = points["efficiency"] * relative_error
    points.loc[0, "efficiency_interval"] = np.nan
    return points


def _can_scale(row: TrialRow, kind: Kind) -> bool:
    """Return whether a trial can be part of a series.

    The fixed settings of the kind must be known, and in weak scaling the global batch must grow
    with the devices. It does not grow if one gate routes for all devices.
    """
    settings = trial_settings(row)
    if not all(is_count(settings.get(name)) for name in _FIXED[kind]):
        return False
    if kind == "strong":
        return True
    expected = settings["batch_size"] * settings["accumulation_steps"] * (num_devices(row) or 1)
    return settings.get("global_batch_size") in (None, expected)


def _shared_settings(row: TrialRow, kind: Kind) -> dict[str, Any]:
    return {name: value for name, value in trial_settings(row).items() if name not in _VARYING[kind]}
