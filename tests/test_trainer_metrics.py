"""Tests of the best result of a run: it follows the direction of its metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harness.runs.blob_trainers import blobs, events_of, settings, trainer
from orchestrator import Metric
from orchestrator.errors import UserError
from orchestrator.record.files.reading import of_kind


def churn_loss(model: nn.Module, batch: Any) -> Any:
    """The metrics fall with the loss; the best result is the smallest."""
    loss_sum = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    value = loss_sum.detach()
    return loss_sum, len(batch[1]), {"mae": value, "churn": value}


@pytest.mark.parametrize(
    ("metric", "parts"),
    [
        ("mae", {}),
        ("churn:min", {}),
        ("churn", {"metrics": {"churn": Metric(mode="min")}}),
    ],
)
def test_the_best_result_follows_the_direction_of_its_metric(
    tmp_path: Path, metric: str, parts: dict[str, Any]
) -> None:
    config = settings(tmp_path, early_stopping_metric=metric, early_stopping_patience=2, learning_rate=0.05)
    result = trainer(config, blobs(64), churn_loss, validation=blobs(64), **parts).fit()
    evaluations = of_kind(events_of(tmp_path), "evaluate")
    name = metric.partition(":")[0]
    assert [event["best"] for event in evaluations] == [True] * 3, "each epoch is better than the last"
    assert result.summary["best"][name] == min(event["metrics"][name] for event in evaluations)
    assert of_kind(events_of(tmp_path), "start")[0]["best_by"] == f"{name}:min"
    assert re.search(
        rf"best {name} .* at step {evaluations[-1]['step']}$", result.performance_summary(), re.M
    )


def test_a_metric_without_a_direction_is_refused_before_training(tmp_path: Path) -> None:
    config = settings(tmp_path, early_stopping_metric="churn")
    with pytest.raises(UserError, match="churn:min or churn:max"):
        trainer(config, loss=churn_loss, validation=blobs(32)).fit()
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="a mapping of names to metrics"):
        trainer(config, loss=churn_loss, metrics={"churn": "min"})


def test_another_metric_on_resume_starts_the_best_result_anew(tmp_path: Path) -> None:
    every_step = {"evaluate_every": 1, "checkpoint_every": 1}
    trainer(settings(tmp_path, epochs=1, **every_step), loss=churn_loss, validation=blobs(32)).fit()
    *_, before = of_kind(events_of(tmp_path), "evaluate")
    later = settings(tmp_path, epochs=2, resume="auto", early_stopping_metric="accuracy")

    def worse_loss(model: nn.Module, batch: Any) -> Any:
        loss_sum, count, metrics = churn_loss(model, batch)
        return loss_sum, count, metrics | {"accuracy": metrics["mae"] * 0.001}

    trainer(later, loss=worse_loss, validation=blobs(32)).fit()
    after = next(
        event for event in of_kind(events_of(tmp_path), "evaluate") if event["step"] > before["step"]
    )
    assert after["metrics"]["accuracy"] < before["loss"], "no better than the best loss, as a number"
    assert after["best"] is True
