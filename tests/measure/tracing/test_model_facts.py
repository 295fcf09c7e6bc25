"""Facts of a model, found without computing anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.tasks.load import load_task
from orchestrator.tasks.task import Loss, Task, TensorData


@pytest.mark.parametrize(("capacity", "limited"), [(None, False), (1.25, True)])
def test_a_capacity_of_experts_is_a_fact_of_the_model(capacity: float | None, limited: bool) -> None:
    task = load_task(Config.of(task="digits", experts=4, width=16, capacity_factor=capacity))
    assert model_facts(task, "cpu", "fp32").limits_capacity is limited


class TooLarge(Task):
    """A model of 16 GB whose loss cannot be traced without numbers."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2**16, 2**16, bias=False)

    def train_data(self) -> TensorData:
        return TensorData(torch.zeros(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise RuntimeError("this loss needs numbers")


def test_a_large_model_that_cannot_be_traced_is_not_built() -> None:
    with pytest.raises(
        UserError, match=r"4\.3G parameters \(16\.0 GiB\).*RuntimeError: this loss needs numbers"
    ):
        model_facts(TooLarge(), "cpu", "fp32")
