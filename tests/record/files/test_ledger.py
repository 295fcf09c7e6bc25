"""Tests of the ledger of a sweep: rows are read back, damaged values are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UserError
from orchestrator.record.files.ledger import (
    LEDGER,
    Ledger,
    TrialRow,
    holds_sweep,
    parse_trial,
    rank_trials,
    read_sweep_record,
    tied_trials,
)

DONE = TrialRow(
    1,
    {"batch_size": 16},
    "completed",
    seconds=2.0,
    samples_per_second=100.0,
    interval=0.02,
    phases={"forward": 0.1},
    compile=False,
)


def write_ledger(folder: Path, *rows: TrialRow, objective: str = "throughput") -> Path:
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    ledger.begin({"task": "digits", "objective": objective})
    for row in rows:
        ledger.add(row)
    ledger.close()
    return folder


def test_rows_are_read_back(tmp_path: Path) -> None:
    rows = (
        DONE,
        TrialRow(2, {"batch_size": 64}, "infeasible", "too many"),
        TrialRow(3, {"batch_size": 1}, "failed", "no"),
    )
    record = read_sweep_record(write_ledger(tmp_path, *rows))
    assert (record.rows, record.header["task"], holds_sweep(tmp_path)) == (rows, "digits", True)


def test_the_last_line_of_a_trial_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    write_ledger(tmp_path, TrialRow(1, {}, "failed", "no"), DONE)
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"event": "trial", "trial": 9, "point": {}, "sta')
    assert read_sweep_record(tmp_path).rows == (DONE,)
    ledger = Ledger(tmp_path)  # cuts the torn line off
    ledger.add(TrialRow(2, {}, "failed", "also"))
    ledger.close()
    assert [row.trial for row in read_sweep_record(tmp_path).rows] == [1, 2]


def test_values_of_the_wrong_type_are_left_out() -> None:
    event = {
        "event": "trial",
        "trial": 1,
        "point": {},
        "status": "completed",
        "samples_per_second": "fast",
        "workers": True,
        "more": 3,
    }
    assert parse_trial(event) == TrialRow(1, {}, "completed")
    for broken in ({"trial": "1"}, {"status": "great"}, {"point": [1]}):
        assert parse_trial(event | broken) is None


def test_the_best_trial_completed_and_has_the_best_objective(tmp_path: Path) -> None:
    rows = (
        TrialRow(1, {}, "completed", samples_per_second=10.0, validation_loss=0.5),
        TrialRow(2, {}, "stopped", samples_per_second=99.0, validation_loss=0.1),
        TrialRow(3, {}, "completed", samples_per_second=20.0, validation_loss=0.7),
        TrialRow(4, {}, "completed", samples_per_second=20.0),
    )
    by_speed = read_sweep_record(write_ledger(tmp_path / "a", *rows))
    by_loss = read_sweep_record(write_ledger(tmp_path / "b", *rows, objective="validation_loss"))
    assert [row.trial for row in by_speed.ranked()] == [3, 4, 1], "of equal trials the earlier is first"
    assert by_speed.best() == rows[2]
    assert by_loss.best() == rows[0]
    assert read_sweep_record(write_ledger(tmp_path / "c", rows[1])).best() is None


def test_a_folder_without_a_sweep_is_refused(tmp_path: Path) -> None:
    assert not holds_sweep(tmp_path)
    with pytest.raises(UserError, match="holds no sweep"):
        read_sweep_record(tmp_path)
    (tmp_path / LEDGER).write_text(
        json.dumps({"event": "trial", "trial": 1, "point": {}, "status": "failed"}) + "\n"
    )
    with pytest.raises(UserError, match="holds no sweep"):
        read_sweep_record(tmp_path)


def measured(trial: int, speed: float, interval: float | None = 0.02, **metrics: Any) -> TrialRow:
    return TrialRow(trial, {}, "completed", samples_per_second=speed, interval=interval, metrics=metrics)


def numbers(rows: list[TrialRow]) -> list[int]:
    return [row.trial for row in rows]


def test_trials_are_ranked_by_any_metric_in_its_direction() -> None:
    rows = [
        measured(1, 9.0, churn=0.3, accuracy=0.5),
        measured(2, 8.0, churn=0.1, accuracy=0.9),
        measured(3, 7.0, churn="x"),
    ]
    assert numbers(rank_trials(rows, "churn:min")) == [2, 1]
    assert numbers(rank_trials(rows, "churn:max")) == [1, 2]
    assert numbers(rank_trials(rows, "accuracy")) == [2, 1]
    assert numbers(rank_trials(rows, "throughput")) == [1, 2, 3]


def test_trials_whose_intervals_overlap_are_tied() -> None:
    rows = [measured(1, 1309.0, 0.17), measured(2, 978.0, 0.27), measured(3, 500.0, 0.1)]
    assert numbers(tied_trials(rows, "throughput")) == [2]
    narrow = [measured(1, 1309.0, 0.02), measured(2, 978.0, 0.02)]
    assert tied_trials(narrow, "throughput") == []
    too_short = [measured(1, 1309.0), measured(2, 978.0, None)]
    assert numbers(tied_trials(too_short, "throughput")) == [2]
    assert tied_trials([], "throughput") == []


def test_equal_metrics_are_tied() -> None:
    rows = [measured(1, 1.0, accuracy=0.9), measured(2, 2.0, accuracy=0.9), measured(3, 3.0, accuracy=0.8)]
    assert numbers(tied_trials(rows, "accuracy:max")) == [2]


def test_a_damaged_objective_is_throughput(tmp_path: Path) -> None:
    for number, objective in enumerate(("reward", "accuracy:up", "")):
        record = read_sweep_record(write_ledger(tmp_path / str(number), DONE, objective=objective))
        assert record.objective == "throughput"
        assert record.best() == DONE
