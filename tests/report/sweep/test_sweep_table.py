"""Tests of the table of a running sweep and of the texts in it."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table

from harness.fakes.fake_sweep import MIXED, FakeSweep, trial_row, write_record
from orchestrator.record.files.ledger import TrialRow
from orchestrator.report.sweep.sweep_table import (
    RunningTrial,
    SweepState,
    headline,
    live_table,
    seconds_left,
)


def render(table: Table, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def table_of(
    rows: Sequence[TrialRow], running: Sequence[RunningTrial] = (), objective: str = "throughput"
) -> str:
    return render(live_table(SweepState(rows, running, total=30, done=len(rows), objective=objective)))


def test_headline_counts_trials_by_status(tmp_path) -> None:
    rows = write_record(tmp_path, MIXED).rows
    assert headline(rows[:20], 2, 36, 20).startswith(
        "20 of 36 trials: 8 completed, 1 stopped, 1 failed, 4 out of memory, 6 infeasible; 2 running; about "
    )
    assert headline([], 0, 4, 0) == "0 of 4 trials"
    assert headline([], 0, 4, 3) == "3 of 4 trials: 3 before"


def test_seconds_left_come_from_the_mean_and_the_number_of_running_trials() -> None:
    rows = [
        TrialRow(1, {}, "completed", seconds=10.0),
        TrialRow(2, {}, "failed", seconds=2.0),
        TrialRow(3, {}, "infeasible"),
    ]
    assert seconds_left(rows, 2, 8) == pytest.approx(24.0), "six seconds each, two at a time"
    assert seconds_left(rows, 0, 1) == pytest.approx(6.0)
    assert seconds_left(rows, 1, 0) is None
    assert seconds_left([], 1, 5) is None


def test_only_settings_that_differ_are_shown() -> None:
    sweep = FakeSweep()
    rows = [trial_row(sweep, number, {"precision": "fp32", "batch_size": 16 * number}) for number in (1, 2)]
    shown = table_of(rows)
    assert "batch_size 32" in shown
    assert "precision" not in shown
    assert "precision fp32" in table_of(rows[:1]), "of one trial all settings are shown"


def test_by_validation_loss_the_lowest_is_first() -> None:
    rows = [
        TrialRow(1, {}, "completed", validation_loss=0.5),
        TrialRow(2, {}, "completed", validation_loss=0.25),
        TrialRow(3, {}, "completed"),
    ]
    shown = table_of(rows, objective="validation_loss")
    assert " loss " in shown
    assert " loss " not in table_of(rows)
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines] == ["2", "1"]


def test_running_trials_past_the_limit_are_counted_only() -> None:
    running = [RunningTrial(number, {"batch_size": number}) for number in range(1, 20)]
    shown = table_of([], running)
    assert "19 running" in shown
    assert "batch_size 7" not in shown
