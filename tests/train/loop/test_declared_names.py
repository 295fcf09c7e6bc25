"""A declared metric that the loss never returns is a warning, and an error where it decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.runs.loop_runs import StepCounter, run_loop
from orchestrator.config.metric import Metric
from orchestrator.errors import UserError
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import Loss, Task, TensorData

SETTINGS: dict[str, Any] = {"batch_size": 4, "epochs": 2, "experts": None, "expert_hidden_size": ()}


class Churn(Task):
    """A task whose loss returns ``churn``, and ``margin`` in evaluation only."""

    def __init__(self, *declared: str, has_validation: bool = True) -> None:
        self.metrics = {name: Metric(mode="min") for name in declared}
        self._has_validation = has_validation

    def build_model(self) -> nn.Module:
        return StepCounter()

    def train_data(self) -> TensorData:
        return TensorData(torch.ones(8, 1))

    def validation_data(self) -> TensorData | None:
        return TensorData(torch.ones(4, 1)) if self._has_validation else None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total = model(batch[0]).sum()
        metrics = {"churn": total.detach()}
        return Loss(total, 4, metrics if model.training else metrics | {"margin": total.detach()})


def warnings_of(folder: Path, task: Task) -> list[str]:
    run_loop(folder, task, **SETTINGS)
    warnings = of_kind(read_events(folder / "events.jsonl"), "warning")
    return [event["message"] for event in warnings if event["kind"] == "metric"]


def test_a_misspelt_metric_is_named_once_after_the_first_evaluation(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, Churn("chrun", "margin", "loss")) == [
        "metrics declares 'chrun' (did you mean 'churn'?), which the loss does not return; "
        "the metrics are: loss, churn, margin. Use the same name in both"
    ]


def test_without_validation_data_the_first_step_tells(tmp_path: Path) -> None:
    (message,) = warnings_of(tmp_path, Churn("chrun", has_validation=False))
    assert "'chrun' (did you mean 'churn'?)" in message
    assert "the metrics are: loss, churn." in message


@pytest.mark.parametrize("has_validation", [True, False])
def test_metrics_that_come_give_no_warning(tmp_path: Path, has_validation: bool) -> None:
    assert warnings_of(tmp_path, Churn("churn", "loss", has_validation=has_validation)) == []


def test_a_misspelt_metric_that_decides_the_best_result_is_an_error(tmp_path: Path) -> None:
    message = (
        r"--early-stopping-metric 'chrun' \(did you mean 'churn'\?\) is not among .*: loss, churn, margin"
    )
    with pytest.raises(UserError, match=message):
        run_loop(tmp_path, Churn("chrun"), early_stopping_metric="chrun", **SETTINGS)
    assert of_kind(read_events(tmp_path / "events.jsonl"), "step") == []
