"""Finds the names of a task's validation metrics before a run starts, from the loss of two samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from orchestrator.config.metric import missing_metric
from orchestrator.errors import UserError
from orchestrator.measure.tracing.fake_batches import fake_tensor_mode, first_samples, to_fake
from orchestrator.tasks.task import Task
from orchestrator.tasks.validate import as_loss, build_checked_model
from orchestrator.train.data import as_dataset

_SAMPLES = 2  # batch norm needs more than one


def check_watched_metric(task: Task, metric: str) -> None:
    """Raise UserError for a metric of ``--early-stopping-metric`` that the validation does not have.

    A task whose metrics cannot be found here is checked by the workers, with a batch of their own.
    """
    if metric == "loss":
        return
    names = validation_metrics(task)
    if names is not None and metric not in names:
        raise UserError(missing_metric("--early-stopping-metric", metric, names))


def validation_metrics(task: Task) -> list[str] | None:
    """Return the names of the metrics, the loss excluded; None if they cannot be found."""
    data = task.validation_data() if hasattr(task, "validation_data") else None
    if data is None:
        return None
    batch = first_samples(as_dataset(data), _SAMPLES, "validation")
    for find in (_names_of_fake_loss, _names_of_loss):
        names = _unless_it_fails(lambda find=find: find(task, batch))
        if names is not None:
            return names
    return None


def _names_of_fake_loss(task: Task, batch: Any) -> list[str]:
    cpu = torch.device("cpu")
    with fake_tensor_mode() as mode, cpu:
        return _names(task, build_checked_model(task), to_fake(mode, batch, cpu))


def _names_of_loss(task: Task, batch: Any) -> list[str]:
    return _names(task, build_checked_model(task).cpu(), batch)


@torch.no_grad()
def _names(task: Task, model: nn.Module, batch: Any) -> list[str]:
    # A task may return other metrics in evaluation than in training.
    model.eval()
    loss, _ = as_loss(task.loss(model, batch), _SAMPLES)
    return [*loss.metrics, *loss.updates]


def _unless_it_fails(find: Callable[[], list[str]]) -> list[str] | None:
    # Not every model runs without data, or on a CPU; an error of the user's code is reported later,
    # with the user's frame.
    try:
        return find()
    except Exception:
        return None
