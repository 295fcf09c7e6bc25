"""Tests of the tables of a run as DataFrames."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import orchestrator
from harness.fakes.fake_events import PHASES_PARALLEL, FakeRun, run_events
from harness.fakes.fake_evolution import EVOLVING, write_evolving_run
from harness.fakes.fake_run import write_events, write_run
from orchestrator.errors import UserError
from orchestrator.report.run.figures.frames import MAX_METRICS, Frame, as_column, read_run

RECOVERED = FakeRun(workers=3, recover_at=70, phases=PHASES_PARALLEL)


def step(number: int, **fields) -> dict:
    return {"event": "step", "time": 1e9 + number, "step": number, "loss": 1.0 / number, **fields}


def test_a_run_has_a_row_per_step(tmp_path) -> None:
    steps: Frame = read_run(write_run(tmp_path))
    assert steps.index.tolist() == list(range(1, 121))
    assert steps.index.name == "step"
    names = ["epoch", "loss", "grad_norm", "lr", "samples", "units", "seconds", "warm_up", "time"]
    assert steps.columns.tolist() == [*names, "accuracy", "validation_loss", "validation_accuracy"]


def test_read_run_is_public_and_takes_a_text(tmp_path) -> None:
    write_run(tmp_path)
    pd.testing.assert_frame_equal(orchestrator.read_run(str(tmp_path)), read_run(tmp_path))


def test_columns_can_be_computed_with(tmp_path) -> None:
    steps: Frame = read_run(write_run(tmp_path))
    assert steps["loss"].dtype == "float64"
    assert steps["epoch"].dtype == "int64"
    assert steps["warm_up"].dtype == "bool"
    assert isinstance(steps["time"].dtype, pd.DatetimeTZDtype)
    assert steps.groupby("epoch")["loss"].mean().is_monotonic_decreasing
    assert steps["samples"].sum() == 120 * 64


def test_a_replayed_step_counts_once_by_its_last_line(tmp_path) -> None:
    folder = write_run(tmp_path, RECOVERED)
    lines = [event for event in run_events(RECOVERED) if event["event"] == "step" and event["step"] == 65]
    assert len(lines) == 2
    steps: Frame = read_run(folder)
    assert steps.index.is_unique
    assert steps.loc[65, "loss"] == lines[1]["loss"] != lines[0]["loss"]


def test_evaluations_are_joined_to_their_step(tmp_path) -> None:
    folder = write_run(tmp_path)
    steps: Frame = read_run(folder)
    evaluations: Frame = read_run(folder, "evaluations")
    evaluated = steps.dropna(subset="validation_loss")
    assert evaluated.index.tolist() == evaluations.index.tolist() == [30, 60, 90, 120]
    assert evaluated["validation_loss"].tolist() == evaluations["loss"].tolist()
    assert evaluated["validation_accuracy"].tolist() == evaluations["accuracy"].tolist()
    assert evaluations["best"].all()


def test_the_other_tables_have_a_row_per_event(tmp_path) -> None:
    folder = write_run(tmp_path, FakeRun(experts=8, hosted=True, workers=3, recover_at=70))
    epochs: Frame = read_run(folder, "epochs")
    assert epochs.index.tolist() == [0, 1, 2, 3]
    assert epochs["memory_allocated_bytes"].gt(0).all()
    phases: Frame = read_run(folder, "phases")
    assert phases["forward_seconds"].gt(0).all()
    assert phases["total_seconds"].iloc[0] == pytest.approx(0.08)
    exchanges: Frame = read_run(folder, "exchanges")
    assert exchanges["bytes"].gt(0).all()
    assert read_run(folder, "checkpoints")["path"].tolist()[0] == "checkpoints/step_00000030"
    failures: Frame = read_run(folder, "failures")
    assert failures[["kind", "message", "rank", "final"]].values.tolist() == [
        ["worker", "worker 1 was lost", 1, False]
    ]
    recoveries: Frame = read_run(folder, "recoveries")
    assert recoveries["lost_steps"].tolist() == [10]
    assert recoveries["total_seconds"].tolist() == [12.3]
    assert recoveries["replay_seconds"].isna().all(), "absent in the event, so missing in the table"


def test_an_unknown_table_is_refused_with_the_known_ones(tmp_path) -> None:
    with pytest.raises(UserError, match="no table 'losses'; it has steps, evaluations, epochs, phases"):
        read_run(write_run(tmp_path), "losses")


def test_a_run_without_steps_has_empty_tables(tmp_path) -> None:
    folder = write_run(tmp_path, FakeRun(steps=0, epochs=1, ends="failed"))
    steps: Frame = read_run(folder)
    assert len(steps) == 0
    assert {"loss", "seconds", "validation_loss"} <= set(steps.columns)
    assert len(read_run(folder, "failures")) == 1


def test_non_finite_losses_are_numbers(tmp_path) -> None:
    steps: Frame = read_run(write_run(tmp_path, FakeRun(broken={3: "nan", 4: "inf"})))
    assert steps["loss"].dtype == "float64"
    assert steps["loss"].isna().sum() == 1
    assert steps.loc[4, "loss"] == float("inf")


def test_a_metric_with_a_taken_name_gets_a_prefix(tmp_path) -> None:
    metrics = {"loss": 7.0, "step": 8.0, "validation_loss": 9.0}
    evaluation = {"event": "evaluate", "step": 1, "loss": 0.5, "metrics": {"best": 3.0}}
    steps: Frame = read_run(write_events(tmp_path, [step(1, metrics=metrics), evaluation]))
    row = steps.loc[1]
    assert (row["loss"], row["metrics.loss"], row["metrics.step"]) == (1.0, 7.0, 8.0)
    assert (row["validation_loss"], row["metrics.validation_loss"]) == (9.0, 0.5)
    assert row["validation_metrics.best"] == 3.0


def test_malformed_values_are_missing(tmp_path) -> None:
    odd = {"loss": [1], "lr": "fast", "seconds": True, "samples": 10**400, "time": 1e300, "metrics": "x"}
    steps: Frame = read_run(
        write_events(tmp_path, [step(1) | odd, step(2, metrics={"a": {"b": 1}, "c": "inf"})])
    )
    assert steps.loc[1, ["loss", "lr", "seconds", "samples", "time"]].isna().all()
    assert steps.loc[2, "loss"] == 0.5
    assert "a" not in steps.columns
    assert steps.loc[2, "c"] == float("inf")


def test_an_absurd_number_of_metrics_is_refused(tmp_path) -> None:
    """A table with a column per line would outgrow the memory."""
    events = [step(number, metrics={f"m{number}": 1.0}) for number in range(1, MAX_METRICS + 2)]
    with pytest.raises(UserError, match=f"{MAX_METRICS + 1} different metrics"):
        read_run(write_events(tmp_path, events))
    assert len(read_run(tmp_path, "recoveries")) == 0, "the other tables are readable"


def test_other_folders_are_refused_in_words(tmp_path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_run(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"holds no events\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps(step(1)) + "\n")
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "int64"),
        ([1, None], "Int64"),
        ([1, 2.5, None], "float64"),
        ([True, False], "bool"),
        ([True, None], "boolean"),
        (["a", None], "object"),
        ([16, "auto"], "object"),
        ([True, 1], "object"),
        ([10**30, 1], "float64"),
        ([10**400, 1], "object"),
        ([None], "float64"),
        ([], "float64"),
    ],
)
def test_a_column_has_the_narrowest_type(values: list, dtype: str) -> None:
    assert as_column(values).dtype == dtype


def test_pandas_is_imported_late(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, orchestrator.report.run.figures.frames, orchestrator.report.sweep.page; assert 'pandas' not in sys.modules"  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True)


def test_changes_of_experts_are_a_table(tmp_path) -> None:
    folder = write_evolving_run(tmp_path, replace(EVOLVING, resume_at=75))
    changes: Frame = read_run(folder, "expert_changes")
    assert changes["step"].tolist() == [20, 40, 50, 60, 70, 70, 80], "repeated changes count once"
    assert changes["change"].tolist()[-2:] == ["undone", "pruned"]
    assert changes["parents"].tolist()[2] == [0, 3]
    assert changes["loss_after"].iloc[0] == pytest.approx(0.516)
    assert changes["experts"].tolist() == [5, 5, 4, 5, 5, 4, 3]
