"""Tests of the names of validation metrics, found before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.errors import UserError
from orchestrator.measure.tracing.metric_names import check_validation_metrics, validation_metrics
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.tasks.metrics import F1
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
    found = validation_metrics(task)
    assert found is not None
    assert found.names == ["margin", "f1"]
    check_validation_metrics(task, "f1")
    check_validation_metrics(task, "loss")
    with pytest.raises(UserError, match=r"--early-stopping-metric 'auc' is not among .*: loss, margin, f1"):
        check_validation_metrics(task, "auc")
    with pytest.raises(UserError, match=r"'margn' \(did you mean 'margin'\?\) is not among"):
        check_validation_metrics(task, "margn")


class WithF1(Own):
    """A declared metric, whose values come in evaluation only."""

    def __init__(self, *returned: str) -> None:
        self.metrics: Any = {"f1": F1()}
        self.returned = returned

    def loss(self, model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        labels = torch.zeros(len(batch[0]), dtype=torch.int64)
        values = (torch.cat([outputs, outputs], 1).detach(), labels)
        metrics = {} if model.training else dict.fromkeys(self.returned, values)
        return Loss(outputs.sum(), len(batch[0]), metrics)


def test_values_in_evaluation_only_are_enough():
    task: Any = WithF1("f1")
    check_validation_metrics(task, "loss")
    model_facts(task, "cpu", "fp32")


def test_a_declared_metric_without_values_is_refused():
    task: Any = WithF1()
    with pytest.raises(UserError, match="the metric 'f1' has an update, and the loss returns no values"):
        check_validation_metrics(task, "loss")


class SometimesF1(WithF1):
    """Values for batches with a large sum alone, which the first one does not have."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.returned = ("f1",) if batch[0].abs().sum() > 1e9 else ()
        return super().loss(model, batch)


def test_a_metric_of_some_batches_is_left_to_the_evaluation():
    task: Any = SometimesF1()
    check_validation_metrics(task, "loss")


def test_a_tuple_without_a_declared_metric_is_refused():
    task: Any = WithF1("f1", "f2")
    with pytest.raises(UserError, match="returns a tuple for the metric 'f2', and no Metric"):
        check_validation_metrics(task, "loss")


class UndeclaredTuple(Own):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        total = model(batch[0]).sum()
        return Loss(total, len(batch[0]), {"f1": (total.detach(), batch[0])})


def test_the_first_batch_finds_a_tuple_without_a_declared_metric():
    task: Any = UndeclaredTuple()
    with pytest.raises(UserError, match="returns a tuple for the metric 'f1', and no Metric"):
        model_facts(task, "cpu", "fp32")


@pytest.mark.parametrize("task", [Broken(), WithoutValidation()])
def test_a_task_whose_metrics_cannot_be_found_is_left_to_the_workers(task: Any):
    assert validation_metrics(task) is None
    check_validation_metrics(task, "f1")
