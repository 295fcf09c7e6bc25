"""Strong and weak scaling against figures worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.sweep.scaling import (
    all_series,
    best_by_devices,
    devices_of,
    phase_shares,
    predicted_hours,
    ranked,
    scaled,
    series_of,
    settings_of,
)
from tests.support.fake_sweep import EXPERTS, MIXED, NOTHING, SINGLE, STRONG, write_record


def trial(
    number: int,
    workers: int | None,
    rate: float | None,
    batch: int = 16,
    accumulation: int = 1,
    **fields: Any,
) -> TrialRow:
    strategy = "single" if workers == 1 else "data_parallel"
    filled: dict[str, Any] = {
        "workers": workers,
        "strategy": strategy,
        "batch_size": batch,
        "accumulation_steps": accumulation,
    }
    whole = batch * accumulation * workers if workers else None
    row = TrialRow(
        number,
        {"workers": workers, "batch_size": batch},
        "completed",
        samples_per_second=rate,
        global_batch_size=whole,
        **filled,
    )
    return replace(row, **fields)


def sweep(*rows: TrialRow, **header: Any) -> SweepRecord:
    from pathlib import Path

    return SweepRecord(Path("sweep"), {"event": "sweep", "objective": "throughput", **header}, rows)


def test_speed_up_and_efficiency_against_one_device() -> None:
    points = scaled([trial(2, 4, 320.0, interval=0.03), trial(1, 1, 100.0, interval=0.04)])
    assert [(p.devices, p.speedup, p.efficiency) for p in points] == [(1, 1.0, 1.0), (4, 3.2, 0.8)]
    assert points[0].uncertainty is None, "the base is what it is compared with"
    assert points[1].uncertainty == pytest.approx(0.8 * 0.05), "3% and 4% add in squares to 5%"


def test_without_one_device_the_fewest_are_the_base_per_device() -> None:
    points = scaled([trial(1, 2, 100.0), trial(2, 8, 320.0)])
    assert points[1].speedup == pytest.approx(3.2)
    assert points[1].efficiency == pytest.approx(3.2 / 4)
    assert points[1].uncertainty is None, "no interval was measured"


def test_more_than_linear_is_told_as_it_is() -> None:
    assert scaled([trial(1, 1, 100.0), trial(2, 2, 230.0)])[1].efficiency == pytest.approx(1.15)


def test_of_several_rows_on_as_many_devices_the_fastest_counts() -> None:
    points = scaled(
        [trial(1, 1, 90.0), trial(2, 1, 100.0), trial(3, 2, 150.0), trial(4, 2, None), trial(5, None, 900.0)]
    )
    assert [p.row.trial for p in points] == [2, 3]


def test_one_gate_for_all_is_no_weak_scaling() -> None:
    record = sweep(trial(1, 1, 100.0), trial(2, 2, 150.0, global_batch_size=16))
    assert series_of(record, "weak") == []
    assert [series.kind for series in series_of(record, "strong")] == ["strong"]


def test_a_run_of_few_steps_is_soon_over() -> None:
    record = sweep(trial(1, 1, 100.0), samples=1000, epochs=10, settings={"max_steps": 50})
    assert predicted_hours(record, record.rows[0]) == pytest.approx(50 * 16 / 100.0 / 3600)


def test_weak_series_keep_the_batch_of_a_device() -> None:
    record = sweep(
        trial(1, 1, 100.0),
        trial(2, 2, 190.0),
        trial(3, 4, 360.0),
        trial(4, 1, 150.0, batch=64),
        trial(5, 2, 290.0, 64),
    )
    found = series_of(record, "weak")
    assert [[p.row.trial for p in s.points] for s in found] == [[1, 2, 3], [4, 5]]
    assert found[0].settings["batch_size"] == 16
    assert "global_batch_size" not in found[0].settings


def test_strong_series_keep_the_global_batch() -> None:
    record = sweep(
        trial(1, 1, 100.0, 64),
        trial(2, 2, 180.0, 32),
        trial(3, 2, 170.0, 16, 2),
        trial(4, 4, 300.0, 16),
        trial(5, 4, 999.0, 64),
    )
    (found,) = series_of(record, "strong")
    assert [p.row.trial for p in found.points] == [1, 2, 4], (
        "the faster of the two ways to divide the batch by two"
    )
    assert found.settings["global_batch_size"] == 64
    assert [s.kind for s in all_series(record)] == ["strong", "weak"], (
        "64 a device on one and on four is a weak series"
    )


def test_another_setting_makes_another_series() -> None:
    point = {"workers": 1, "learning_rate": 1e-3}
    record = sweep(
        trial(1, 1, 100.0, point=point),
        trial(2, 2, 190.0, point=point | {"workers": 2, "learning_rate": 1e-2}),
    )
    assert all_series(record) == []
    record = sweep(trial(1, 1, 100.0, precision="bf16"), trial(2, 2, 190.0, precision="fp32"))
    assert all_series(record) == []


def test_what_was_filled_in_counts_and_not_how_it_was_asked_for() -> None:
    asked = trial(1, 1, 100.0, precision="bf16", point={"workers": 1, "precision": "auto"})
    named = trial(2, 2, 190.0, precision="bf16", point={"workers": 2, "precision": "bf16"})
    assert len(series_of(sweep(asked, named), "weak")) == 1


@pytest.mark.parametrize("status", ["stopped", "failed", "out_of_memory", "infeasible"])
def test_only_completed_rows_scale(status: str) -> None:
    record = sweep(trial(1, 1, 100.0), trial(2, 2, 190.0, status=status))
    assert all_series(record) == []
    assert list(best_by_devices(record)) == [1]


def test_one_process_is_the_base_of_every_strategy(tmp_path) -> None:
    found = series_of(write_record(tmp_path, EXPERTS), "weak")
    assert {s.settings["strategy"] for s in found} == {"data_parallel", "expert_parallel"}
    assert all(s.points[0].row.strategy == "single" and len(s.points) == 4 for s in found)
    assert all(s.points[-1].row.strategy == s.settings["strategy"] for s in found)


def test_series_need_two_numbers_of_devices(tmp_path) -> None:
    assert all_series(write_record(tmp_path / "a", SINGLE)) == []
    assert all_series(write_record(tmp_path / "b", NOTHING)) == []
    assert {s.kind for s in all_series(write_record(tmp_path / "c", STRONG))} == {"strong", "weak"}


def test_the_best_of_each_number_of_devices_is_by_the_objective() -> None:
    rows = (
        trial(1, 1, 100.0, validation_loss=0.5),
        trial(2, 1, 200.0, validation_loss=0.9),
        trial(3, 2, 90.0, validation_loss=0.4),
        trial(4, 2, 80.0, validation_loss=math.nan),
    )
    assert {n: row.trial for n, row in best_by_devices(sweep(*rows)).items()} == {1: 2, 2: 3}
    by_loss = replace(sweep(*rows), header={"objective": "validation_loss"})
    assert {n: row.trial for n, row in best_by_devices(by_loss).items()} == {1: 1, 2: 3}
    assert [row.trial for row in ranked(by_loss)] == [3, 1, 2], "nan is no result"


def test_the_best_is_the_ledgers_best(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    assert ranked(record)[0] == record.best()


def test_settings_are_the_point_and_what_the_plan_made_of_it() -> None:
    asked = {"parallel_strategy": "auto", "batch_size": "auto", "learning_rate": 0.1}
    row = TrialRow(1, asked, "completed", workers=2, strategy="data_parallel", batch_size=8, accumulation_steps=3)
    assert settings_of(row) == {
        "learning_rate": 0.1,
        "workers": 2,
        "strategy": "data_parallel",
        "batch_size": 8,
        "accumulation_steps": 3,
        "global_batch_size": 48,
    }
    assert devices_of(TrialRow(1, {"workers": 3}, "infeasible")) == 3
    assert devices_of(TrialRow(1, {"workers": "auto"}, "failed")) is None


def test_the_whole_run_in_hours() -> None:
    record = sweep(samples=60_000, epochs=3)
    assert predicted_hours(record, trial(1, 1, 100.0)) == pytest.approx(0.5)
    assert predicted_hours(record, trial(1, 1, 100.0, point={"epochs": 6})) == pytest.approx(1.0)
    assert predicted_hours(record, trial(1, 1, None)) is None
    assert predicted_hours(sweep(), trial(1, 1, 100.0)) is None


def test_phases_are_parts_of_the_step() -> None:
    row = trial(1, 1, 100.0, phases={"forward": 0.3, "backward": 0.5, "data": "nan"}, step_seconds=1.0)
    assert phase_shares(row) == {"forward": 0.3, "backward": 0.5}, (
        "what no phase accounts for belongs to none"
    )
    assert phase_shares(replace(row, step_seconds=None)) == {
        "forward": pytest.approx(0.375),
        "backward": pytest.approx(0.625),
    }
    assert phase_shares(trial(1, 1, 100.0)) == {}
