"""Tests of the objective of a sweep: its direction, and the settings that can change it."""

from __future__ import annotations

import pytest

from orchestrator.config.metric import Criterion, Metric
from orchestrator.config.sweep.objective import complete_objective, read_objective
from orchestrator.config.sweep.space_parser import parse_space, points_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.errors import UserError


@pytest.mark.parametrize(
    ("text", "criterion"),
    [
        ("throughput", Criterion("throughput", "max")),
        ("validation_loss", Criterion("validation_loss", "min")),
        ("accuracy", Criterion("accuracy", "max")),
        ("mae", Criterion("mae", "min")),
        ("churn:min", Criterion("churn", "min")),
    ],
)
def test_an_objective_has_a_direction(text: str, criterion: Criterion) -> None:
    assert read_objective(text) == criterion


def test_the_ledger_keeps_the_direction_that_the_task_declares() -> None:
    declared = {"churn": Metric(mode="min")}
    assert complete_objective("churn", declared) == "churn:min"
    assert complete_objective("accuracy", declared) == "accuracy:max"
    assert complete_objective("loss", declared) == "validation_loss"
    assert complete_objective("throughput", declared) == "throughput"
    with pytest.raises(UserError, match="write --objective reward:min or reward:max"):
        complete_objective("reward", declared)


@pytest.mark.parametrize(
    ("space", "objective", "message"),
    [
        ("learning-rate=1e-4,1e-3", "throughput", "use --objective validation_loss or a metric"),
        ("weight-decay=0..0.1", "throughput", "weight_decay cannot change the objective throughput"),
        ("loader-workers=0,2", "validation_loss", "use --objective throughput"),
        ("bucket-cap-mb=10,20", "accuracy", "bucket_cap_mb cannot change the objective accuracy"),
        ("keep=1,2", "throughput", "keep changes no result of a trial"),
        ("batch-size=8,16", "accuracy:up", "it must be NAME, NAME:min or NAME:max"),
    ],
)
def test_a_setting_that_cannot_change_the_objective_is_refused(
    space: str, objective: str, message: str
) -> None:
    search = "random" if ".." in space else "grid"
    trials = 2 if search == "random" else None
    with pytest.raises(UserError, match=message):
        Sweep(parse_space(["width=8,16", space]), search, trials, objective)


def test_a_setting_with_one_value_is_no_part_of_the_comparison() -> None:
    Sweep(parse_space(["batch-size=8,16", "learning-rate=1e-3"]))
    Sweep(points_space([{"batch_size": 8, "seed": 1}, {"batch_size": 16, "seed": 1}], "here"))
    with pytest.raises(UserError, match="seed cannot change"):
        Sweep(points_space([{"batch_size": 8, "seed": 1}, {"batch_size": 16, "seed": 2}], "here"))
