"""Checks of a task's results: its model and its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.config.metric import declared_metrics, undeclared_update
from orchestrator.errors import UserError
from orchestrator.tasks.task import Loss, Task


def build_checked_model(task: Task) -> nn.Module:
    """Build the task's model; raise if it is no module."""
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the task's build_model returns a {type(model).__name__}; a torch.nn.Module was needed"
        )
    return model


def as_loss(result: Any, samples: int) -> tuple[Loss, float]:
    """Convert any form of a task's loss to ``Loss``, with the weight of its sum.

    A plain scalar is a mean over the samples, so its weight is their number; the weight of a sum is 1.
    Metrics that are tuples become its ``updates``.
    """
    if isinstance(result, Loss):
        if all(isinstance(value, Tensor) for value in result.metrics.values()):
            return result, 1.0
        device = result.sum.device
        updates = {name: value for name, value in result.metrics.items() if isinstance(value, tuple)}
        sums = {
            name: torch.as_tensor(value, device=device)
            for name, value in result.metrics.items()
            if name not in updates
        }
        return replace(result, metrics=sums, updates=updates), 1.0
    if isinstance(result, Tensor):
        if result.ndim:
            raise UserError(
                f"the task's loss is a tensor of shape {tuple(result.shape)}; "
                "a scalar, (sum, count) or Loss was needed"
            )
        return Loss(result, samples), float(samples)
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], Tensor):
        metrics: Mapping[str, Tensor] = result[2] if len(result) == 3 else {}
        return as_loss(Loss(result[0], result[1], metrics), samples)
    raise UserError(
        f"the task's loss is a {type(result).__name__}; a scalar tensor, (sum, count) or Loss was needed"
    )


def check_trainable(loss: Loss) -> None:
    """Raise if the loss depends on no weight."""
    if not loss.sum.requires_grad:
        raise UserError(
            "the task's loss does not depend on any weight that is trained; "
            "compute it from the model's output, undetached"
        )


def check_updates_declared(task: Task, updates: Collection[str]) -> None:
    """Raise if the loss returns a tuple for a metric that is not declared with an update."""
    declared = declared_metrics(task)
    for name in updates:
        if name not in declared or not declared[name].has_state:
            raise UserError(undeclared_update(name))
