"""Tests of the facts of a single trial."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.sweep.trials import num_devices, phase_shares, predicted_hours, trial_settings


def trial(
    number: int,
    workers: int | None,
    rate: float | None,
    batch: int = 16,
    accumulation: int = 1,
    **fields: Any,
) -> TrialRow:
    """Return a completed trial, with other fields as given."""
    row = TrialRow(
        number,
        {"workers": workers, "batch_size": batch},
        "completed",
        samples_per_second=rate,
        workers=workers,
        strategy="single" if workers == 1 else "data_parallel",
        batch_size=batch,
        accumulation_steps=accumulation,
        global_batch_size=batch * accumulation * workers if workers else None,
    )
    return replace(row, **fields)


def sweep(*rows: TrialRow, **header: Any) -> SweepRecord:
    return SweepRecord(Path("sweep"), {"event": "sweep", "objective": "throughput", **header}, rows)


def test_settings_are_the_point_overridden_by_the_plan() -> None:
    point = {"parallel_strategy": "auto", "batch_size": "auto", "learning_rate": 0.1}
    row = TrialRow(
        1, point, "completed", workers=2, strategy="data_parallel", batch_size=8, accumulation_steps=3
    )
    assert trial_settings(row) == {
        "learning_rate": 0.1,
        "workers": 2,
        "strategy": "data_parallel",
        "batch_size": 8,
        "accumulation_steps": 3,
        "global_batch_size": 48,
    }


@pytest.mark.parametrize(
    ("workers", "devices"), [(3, 3), ("auto", None), (0, None), (True, None), (2.0, None), (10**30, None)]
)
def test_devices_are_one_per_worker(workers: Any, devices: int | None) -> None:
    assert num_devices(TrialRow(1, {"workers": workers}, "infeasible")) == devices


def test_the_hours_of_the_whole_run_come_from_samples_and_epochs() -> None:
    record = sweep(samples=60_000, epochs=3)
    assert predicted_hours(record, trial(1, 1, 100.0)) == pytest.approx(0.5)
    assert predicted_hours(record, trial(1, 1, 100.0, point={"epochs": 6})) == pytest.approx(1.0)
    assert predicted_hours(record, trial(1, 1, None)) is None
    assert predicted_hours(sweep(), trial(1, 1, 100.0)) is None


def test_max_steps_limit_the_whole_run() -> None:
    record = sweep(trial(1, 1, 100.0), samples=1000, epochs=10, settings={"max_steps": 50})
    assert predicted_hours(record, record.rows[0]) == pytest.approx(50 * 16 / 100.0 / 3600)


def test_phase_shares_are_parts_of_the_step() -> None:
    row = trial(1, 1, 100.0, phases={"forward": 0.3, "backward": 0.5}, step_seconds=1.0)
    assert phase_shares(row) == {"forward": 0.3, "backward": 0.5}, "the rest of the step belongs to no phase"
    assert phase_shares(replace(row, step_seconds=None)) == {
        "forward": pytest.approx(0.375),
        "backward": pytest.approx(0.625),
    }
    assert phase_shares(trial(1, 1, 100.0)) == {}
