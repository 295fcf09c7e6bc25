"""Tests of the direction of metrics: given, declared or known, and never guessed."""

from __future__ import annotations

import pytest

from orchestrator.config.metric import Criterion, Metric, Mode, declared_metrics, find_criterion, known_mode
from orchestrator.config.settings import Config
from orchestrator.errors import UserError


@pytest.mark.parametrize(
    ("value", "best", "mode", "better"),
    [
        (1.0, None, "min", True),
        (1.0, 2.0, "min", True),
        (3.0, 2.0, "min", False),
        (2.0, 2.0, "min", False),
        (3.0, 2.0, "max", True),
        (2.0, 2.0, "max", False),
        (float("nan"), None, "min", False),
        (float("-inf"), 2.0, "min", False),
        (float("nan"), 2.0, "max", False),
        (3.0, float("nan"), "min", True),
    ],
)
def test_a_result_is_better_by_its_direction(
    value: float, best: float | None, mode: Mode, better: bool
) -> None:
    criterion = Criterion("any", mode)
    assert criterion.is_better(value, best) is better


SMALLER = (
    "loss",
    "mae",
    "MAE",
    "val_mae",
    "rmse",
    "error",
    "token_error_rate",
    "perplexity",
    "balance_loss",
    "nll",
)
LARGER = ("accuracy", "top1_accuracy", "f1", "macro-F1", "auc", "recall@5", "bleu", "val/precision", "mIoU")
UNKNOWN = (
    "churn",
    "reward",
    "loser",
    "accurate",
    "negative_loss",
    "neg_mae",
    "accuracy_loss",
    "generalization_gap",
    "",
)


@pytest.mark.parametrize("name", SMALLER)
def test_of_these_smaller_is_better(name: str) -> None:
    assert known_mode(name) == "min"


@pytest.mark.parametrize("name", LARGER)
def test_of_these_larger_is_better(name: str) -> None:
    assert known_mode(name) == "max"


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_these_the_direction_is_not_known(name: str) -> None:
    assert known_mode(name) is None


def test_a_given_direction_wins_over_the_declared_and_that_over_the_name() -> None:
    declared = {"loss": Metric(mode="max"), "churn": Metric(mode="min")}
    assert find_criterion("loss:min", declared, "--m") == Criterion("loss", "min")
    assert find_criterion("loss", declared, "--m") == Criterion("loss", "max")
    assert find_criterion("churn", declared, "--m") == Criterion("churn", "min")
    assert find_criterion("mae", declared, "--m") == Criterion("mae", "min")
    assert find_criterion("a:b:max", {}, "--m") == Criterion("a:b", "max")


def test_an_unknown_direction_is_an_error_that_says_how_to_give_it() -> None:
    with pytest.raises(UserError) as error:
        find_criterion("churn", {}, "--early-stopping-metric")
    message = str(error.value)
    assert "write --early-stopping-metric churn:min or churn:max" in message
    assert 'metrics={"churn": Metric(mode="min")}' in message


@pytest.mark.parametrize("text", ["mae:", ":min", "mae:up", "mae:MIN"])
def test_another_ending_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="it must be NAME, NAME:min or NAME:max"):
        Config.of(early_stopping_metric=text)


def test_a_mode_is_min_or_max() -> None:
    with pytest.raises(UserError, match="must be 'min' or 'max'"):
        Metric(mode="down")  # pyrefly: ignore[bad-argument-type]


def test_a_task_may_use_the_name_metrics_for_something_else() -> None:
    class Odd:
        def metrics(self) -> None: ...

    assert declared_metrics(Odd()) == {}
    assert declared_metrics(object()) == {}
