"""Tests of the checks of a task's model and loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.errors import UserError
from orchestrator.tasks.task import Loss, Task
from orchestrator.tasks.validate import as_loss, build_checked_model, check_trainable


def test_a_loss_may_be_a_mean_a_pair_or_a_loss() -> None:
    mean, weight = as_loss(torch.tensor(2.0), 8)
    assert (float(mean.sum) * weight, mean.count) == (16.0, 8)
    pair, weight = as_loss((torch.tensor(6.0), 3), 8)
    assert (float(pair.sum) * weight, pair.count) == (6.0, 3)
    triple, _ = as_loss((torch.tensor(6.0), 3, {"right": 2}), 8)
    assert torch.equal(triple.metrics["right"], torch.tensor(2)), "numbers become tensors"


@pytest.mark.parametrize("result", [torch.zeros(3), "loss", None, (1.0, 2)])
def test_another_loss_is_refused(result: Any) -> None:
    with pytest.raises(UserError, match="needed"):
        as_loss(result, 8)


def test_a_loss_that_depends_on_no_weight_is_refused() -> None:
    check_trainable(Loss(torch.ones((), requires_grad=True), 1))
    with pytest.raises(UserError, match="does not depend on any weight"):
        check_trainable(Loss(torch.ones(()), 1))


def test_a_model_must_be_a_module() -> None:
    class Wrong(Task):
        def build_model(self) -> nn.Module:
            return "a model"  # pyrefly: ignore[bad-return]

        def train_data(self) -> Any: ...

        def loss(self, model: nn.Module, batch: Any) -> Any: ...

    with pytest.raises(UserError, match=r"build_model returns a str; a torch\.nn\.Module was needed"):
        build_checked_model(Wrong())
