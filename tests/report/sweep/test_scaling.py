"""Tests of strong and weak scaling against figures computed by hand."""

import math
from dataclasses import replace

import pytest

from harness.fakes.fake_sweep import EXPERTS, MIXED, NOTHING, SINGLE, STRONG, write_record
from orchestrator.record.files.ledger import TrialRow
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep.frames import scaling_frame
from orchestrator.report.sweep.scaling import (
    ScalingSeries,
    all_series,
    best_by_devices,
    best_series,
    compare,
    measured_trials,
    series_of,
)
from orchestrator.report.sweep.scaling_text import scaling_texts
from tests.report.sweep.test_trials import sweep, trial


def compared(*rows: TrialRow) -> Frame:
    return compare(measured_trials(sweep(*rows)))


def trials_of(series: ScalingSeries) -> list[int]:
    return series.points["trial"].tolist()


def kinds_without_best(series: list[ScalingSeries]) -> list[str]:
    return [one.kind for one in series if one.kind != "best"]


def test_speed_up_and_efficiency_against_one_device() -> None:
    points = compared(trial(2, 4, 320.0, interval=0.03), trial(1, 1, 100.0, interval=0.04))
    assert points["devices"].tolist() == [1, 4]
    assert points["speedup"].tolist() == [1.0, 3.2]
    assert points["efficiency"].tolist() == [1.0, 0.8]
    base, other = points["efficiency_interval"]
    assert math.isnan(base), "the base is compared with itself"
    assert other == pytest.approx(0.8 * 0.05), "3% and 4% add in squares to 5%"


def test_without_one_device_the_fewest_are_the_base() -> None:
    points = compared(trial(1, 2, 100.0), trial(2, 8, 320.0))
    assert points["speedup"][1] == pytest.approx(3.2)
    assert points["efficiency"][1] == pytest.approx(3.2 / 4)
    assert math.isnan(points["efficiency_interval"][1]), "no interval was measured"


def test_superlinear_scaling_is_not_capped() -> None:
    assert compared(trial(1, 1, 100.0), trial(2, 2, 230.0))["efficiency"][1] == pytest.approx(1.15)


def test_the_fastest_trial_of_a_number_of_devices_counts() -> None:
    points = compared(
        trial(1, 1, 90.0), trial(2, 1, 100.0), trial(3, 2, 150.0), trial(4, 2, None), trial(5, None, 900.0)
    )
    assert points["trial"].tolist() == [2, 3]


def test_of_equally_fast_trials_the_earlier_counts() -> None:
    assert compared(trial(7, 1, 100.0), trial(3, 1, 100.0))["trial"].tolist() == [3]


def test_one_gate_for_all_devices_is_no_weak_scaling() -> None:
    record = sweep(trial(1, 1, 100.0), trial(2, 2, 150.0, global_batch_size=16))
    assert series_of(record, "weak") == []
    assert [series.kind for series in series_of(record, "strong")] == ["strong"]


def test_weak_series_keep_the_batch_of_a_device() -> None:
    record = sweep(
        trial(1, 1, 100.0),
        trial(2, 2, 190.0),
        trial(3, 4, 360.0),
        trial(4, 1, 150.0, batch=64),
        trial(5, 2, 290.0, 64),
    )
    series = series_of(record, "weak")
    assert [trials_of(one) for one in series] == [[1, 2, 3], [4, 5]], "the fastest series is the first"
    assert series[0].settings["batch_size"] == 16
    assert "global_batch_size" not in series[0].settings


def test_strong_series_keep_the_global_batch() -> None:
    record = sweep(
        trial(1, 1, 100.0, 64),
        trial(2, 2, 180.0, 32),
        trial(3, 2, 170.0, 16, 2),
        trial(4, 4, 300.0, 16),
        trial(5, 4, 999.0, 64),
    )
    (series,) = series_of(record, "strong")
    assert trials_of(series) == [1, 2, 4], "the faster of two ways to halve the batch"
    assert series.settings["global_batch_size"] == 64
    kinds = kinds_without_best(all_series(record))
    assert kinds == ["strong", "weak"], "64 per device on one and on four is a weak series"


def test_another_setting_makes_another_series() -> None:
    point = {"workers": 1, "learning_rate": 1e-3}
    other = point | {"workers": 2, "learning_rate": 1e-2}
    record = sweep(trial(1, 1, 100.0, point=point), trial(2, 2, 190.0, point=other))
    assert kinds_without_best(all_series(record)) == []
    record = sweep(trial(1, 1, 100.0, precision="bf16"), trial(2, 2, 190.0, precision="fp32"))
    assert kinds_without_best(all_series(record)) == []


def test_planned_values_count_instead_of_requested_ones() -> None:
    automatic = trial(1, 1, 100.0, precision="bf16", point={"workers": 1, "precision": "auto"})
    named = trial(2, 2, 190.0, precision="bf16", point={"workers": 2, "precision": "bf16"})
    assert len(series_of(sweep(automatic, named), "weak")) == 1


@pytest.mark.parametrize("status", ["stopped", "failed", "out_of_memory", "infeasible"])
def test_only_completed_trials_scale(status: str) -> None:
    record = sweep(trial(1, 1, 100.0), trial(2, 2, 190.0, status=status))
    assert kinds_without_best(all_series(record)) == []
    assert list(best_by_devices(record)) == [1]


def test_one_process_is_the_base_of_every_strategy(tmp_path) -> None:
    record = write_record(tmp_path, EXPERTS)
    strategy_of = {row.trial: row.strategy for row in record.rows}
    series = series_of(record, "weak")
    assert {one.settings["strategy"] for one in series} == {"data_parallel", "expert_parallel"}
    for one in series:
        strategies = [strategy_of[number] for number in trials_of(one)]
        assert strategies == ["single", *[one.settings["strategy"]] * 3]


def test_a_trial_without_a_strategy_forms_a_series() -> None:
    record = sweep(trial(1, 1, 100.0), trial(2, 2, 190.0, strategy=None))
    (series,) = series_of(record, "weak")
    assert "strategy" not in series.settings


def test_series_need_two_numbers_of_devices(tmp_path) -> None:
    assert kinds_without_best(all_series(write_record(tmp_path / "a", SINGLE))) == []
    assert all_series(write_record(tmp_path / "b", NOTHING)) == []
    kinds = kinds_without_best(all_series(write_record(tmp_path / "c", STRONG)))
    assert set(kinds) == {"strong", "weak"}


def test_the_best_trial_of_each_number_of_devices_has_the_best_objective() -> None:
    rows = (
        trial(1, 1, 100.0, validation_loss=0.5),
        trial(2, 1, 200.0, validation_loss=0.9),
        trial(3, 2, 90.0, validation_loss=0.4),
        trial(4, 2, 80.0, validation_loss=math.nan),
    )
    by_speed = sweep(*rows)
    by_loss = replace(by_speed, header={"objective": "validation_loss"})
    assert {count: row.trial for count, row in best_by_devices(by_speed).items()} == {1: 2, 2: 3}
    assert {count: row.trial for count, row in best_by_devices(by_loss).items()} == {1: 1, 2: 3}
    assert [row.trial for row in by_loss.ranked()] == [3, 1, 2], "nan is no result"


def test_the_best_series_ends_with_the_best_trial(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    series = best_series(record)
    best = record.best()
    assert series is not None
    assert best is not None
    assert trials_of(series)[-1] == best.trial
    assert series.peak == best.samples_per_second


def test_the_tables_show_the_metric_that_is_the_objective() -> None:
    rows = (trial(1, 1, 100.0, metrics={"accuracy": 0.25}), trial(2, 2, 90.0, metrics={"accuracy": 0.75}))
    record = replace(sweep(*rows), header={"objective": "accuracy:max"})
    frame = scaling_frame(record)
    best = frame[frame["scaling"] == "best"]
    assert best["validation_accuracy"].tolist() == [0.25, 0.75]
    assert scaling_texts(record, best)["accuracy"].tolist() == ["0.25", "0.75"]
