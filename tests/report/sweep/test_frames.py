"""Tests of the tables of a sweep as DataFrames."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import orchestrator
from harness.fakes.fake_sweep import (
    EXPERTS,
    MIXED,
    NOTHING,
    SWEEPS,
    FakeSweep,
    write_record,
    write_sweep,
)
from orchestrator.errors import UserError
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep.frames import read_sweep, scaling_frame, trial_frame
from orchestrator.types import GIB


def add_lines(folder: Path, *trials: dict[str, Any]) -> None:
    """Append trials to a ledger, unchecked."""
    with (folder / "sweep.jsonl").open("a") as ledger:
        ledger.writelines(json.dumps({"event": "trial", **trial}) + "\n" for trial in trials)


@pytest.mark.parametrize("name", SWEEPS)
def test_read_sweep_has_a_row_per_trial(tmp_path, name) -> None:
    record = write_record(tmp_path, SWEEPS[name])
    frame: Frame = read_sweep(tmp_path)
    assert frame.index.tolist() == [row.trial for row in record.rows]
    assert frame.index.name == "trial"
    assert frame["status"].tolist() == [row.status for row in record.rows]
    assert frame["reason"].tolist() == [row.reason for row in record.rows]


def test_read_sweep_is_public_and_takes_a_text(tmp_path) -> None:
    write_sweep(tmp_path, MIXED)
    pd.testing.assert_frame_equal(orchestrator.read_sweep(str(tmp_path)), read_sweep(tmp_path))


def test_settings_and_figures_are_columns_with_units(tmp_path) -> None:
    record = write_record(tmp_path, MIXED)
    frame: Frame = read_sweep(tmp_path)
    row = record.rows[0]
    first = frame.loc[1]
    assert first["samples_per_second"] == row.samples_per_second
    assert first["peak_memory_bytes"] == row.peak_memory_bytes
    assert first["forward_seconds"] == row.phases["forward"]
    assert (first["precision"], first["batch_size"], first["strategy"]) == ("fp32", 16, "single")
    assert frame.loc[3, "workers"] == 4, "an infeasible trial has the requested workers"


def test_columns_can_be_computed_with(tmp_path) -> None:
    write_sweep(tmp_path, MIXED)
    frame: Frame = read_sweep(tmp_path)
    assert frame["samples_per_second"].dtype == "float64"
    assert frame["peak_memory_bytes"].dtype == "Int64", "an integer, although some trials have none"
    assert frame["batch_size"].dtype == "int64"
    assert frame["compile"].dtype == "boolean"
    completed = frame[frame["status"] == "completed"]
    fastest = completed.groupby("workers")["samples_per_second"].max()
    assert fastest.index.tolist() == [1, 2]
    assert fastest.is_monotonic_increasing
    assert (completed["peak_memory_bytes"] / GIB).max() < 16


def test_figures_that_were_not_measured_are_missing(tmp_path) -> None:
    write_sweep(tmp_path, NOTHING)
    frame: Frame = read_sweep(tmp_path)
    assert frame[["samples_per_second", "step_seconds", "peak_memory_bytes"]].isna().all(axis=None)


def test_a_sweep_without_trials_keeps_its_columns(tmp_path) -> None:
    write_sweep(tmp_path, FakeSweep(left=36))
    frame: Frame = read_sweep(tmp_path)
    assert len(frame) == 0
    assert {"status", "precision", "samples_per_second", "point"} <= set(frame.columns)
    assert scaling_frame(write_record(tmp_path / "b", FakeSweep(left=36))).empty


def test_settings_of_different_types_share_a_column(tmp_path) -> None:
    record = write_record(
        tmp_path, FakeSweep(space={"precision": ("auto", "fp32"), "loss_scale": (None, 2.5)})
    )
    frame: Frame = trial_frame(record)
    assert frame["precision"].tolist() == ["bf16", "bf16", "fp32", "fp32"], "the plan's value for auto"
    assert frame["loss_scale"].isna().tolist() == [True, False, True, False]


def test_damaged_values_neither_stop_the_reader_nor_become_figures(tmp_path) -> None:
    write_sweep(tmp_path, FakeSweep(space={"workers": (1, 2)}))
    add_lines(
        tmp_path,
        {"trial": 3, "point": {"workers": 10**40, "x": [1]}, "status": "completed"},
        {"trial": 4, "point": {"workers": 10**400}, "status": "failed", "samples_per_second": "fast"},
        {"trial": 5, "point": {"status": "won", "devices": -1}, "status": "completed", "seconds": 1e308},
    )
    frame: Frame = read_sweep(tmp_path)
    assert frame.index.tolist() == [1, 2, 3, 4, 5]
    assert frame["samples_per_second"].isna().tolist() == [False, False, True, True, True]
    assert frame.loc[5, "seconds"] == 0.0, "no trial took that long"


def test_read_sweep_refuses_other_folders_in_words(tmp_path) -> None:
    with pytest.raises(UserError, match="holds no sweep"):
        read_sweep(tmp_path)
    write_sweep(tmp_path, FakeSweep(space={"workers": (1,)}))
    add_lines(tmp_path, {"trial": 2, "point": {"run_dir": "/etc"}, "status": "completed"})
    with pytest.raises(UserError, match="sets run_dir, which no sweep records"):
        read_sweep(tmp_path)


def test_scaling_rows_compare_with_the_base_of_their_series(tmp_path) -> None:
    frame: Frame = scaling_frame(write_record(tmp_path, EXPERTS))
    expected = frame["speedup"] * frame["against_devices"] / frame["devices"]
    assert frame["efficiency"].tolist() == pytest.approx(expected.tolist())
    bases = frame.groupby("series")["devices"].transform("min")
    assert bases.tolist() == frame["against_devices"].tolist()


def test_series_of_a_kind_have_different_labels(tmp_path) -> None:
    frame: Frame = scaling_frame(write_record(tmp_path, EXPERTS))
    labels = frame[frame["scaling"] == "weak"].groupby("series")["label"].first()
    assert labels.iloc[0] == "batch 32, data parallel"
    assert labels.nunique() == len(labels) == 4


def test_a_setting_with_the_name_of_a_column_hides_no_figure(tmp_path) -> None:
    space = {"workers": (1, 2), "devices": ("many", "few"), "speedup": ("x", "y")}
    frame: Frame = scaling_frame(write_record(tmp_path, FakeSweep(space=space)))
    assert set(frame["devices"]) == {1, 2}
    assert frame["speedup"].dtype == "float64"


def test_validation_metrics_are_columns(tmp_path) -> None:
    write_sweep(tmp_path, MIXED)
    trial = {"trial": 90, "point": {"batch_size": 16}, "status": "completed", "samples_per_second": 9.0}
    add_lines(tmp_path, {**trial, "validation_loss": 0.5, "metrics": {"accuracy": 0.75, "loss": 7.0}})
    frame: Frame = read_sweep(tmp_path)
    assert frame.loc[90, "validation_accuracy"] == 0.75
    assert frame.loc[90, "validation_loss"] == 0.5, "a metric does not replace a figure of ours"
    assert frame["validation_accuracy"].count() == 1, "the other trials have none"
