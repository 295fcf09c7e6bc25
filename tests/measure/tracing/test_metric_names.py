"""Tests of the names of validation metrics, found before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.errors import UserError
from orchestrator.measure.tracing.metric_names import check_watched_metric, validation_metrics
from orchestrator.tasks.task import Loss


class Own:
    """A task with a metric that it returns in evaluation only."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> Tensor:
        return torch.ones(8, 2)

    def validation_data(self) -> Any:
        return torch.ones(8, 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total = model(batch[0]).sum()
        metrics = {"margin": total.detach()}
        return Loss(total, len(batch[0]), metrics if model.training else metrics | {"f1": total.detach()})


class NeedsValues(Own):
    """A loss that reads a value, which fake tensors do not have."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert float(batch[0].sum()) == 4.0
        return super().loss(model, batch)


class Broken(Own):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("broken")


class WithoutValidation(Own):
    def validation_data(self) -> Any:
        return None


@pytest.mark.parametrize("task", [Own(), NeedsValues()])
def test_the_names_are_those_of_an_evaluation(task: Any):
    assert validation_metrics(task) == ["margin", "f1"]
    check_watched_metric(task, "f1")
    check_watched_metric(task, "loss")
    with pytest.raises(UserError, match=r"--early-stopping-metric 'auc' is not among .*: loss, margin, f1"):
        check_watched_metric(task, "auc")
    with pytest.raises(UserError, match=r"'margn' \(did you mean 'margin'\?\) is not among"):
        check_watched_metric(task, "margn")


@pytest.mark.parametrize("task", [Broken(), WithoutValidation()])
def test_a_task_whose_metrics_cannot_be_found_is_left_to_the_workers(task: Any):
    assert validation_metrics(task) is None
    check_watched_metric(task, "f1")
