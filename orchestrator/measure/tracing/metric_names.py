"""Checks a task's validation metrics before a run starts, from the loss of two samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from orchestrator.config.metric import declared_metrics, missing_metric, missing_update
from orchestrator.errors import UserError
from orchestrator.measure.tracing.fake_batches import fake_tensor_mode, to_fake
from orchestrator.tasks.task import Task
from orchestrator.tasks.validate import as_loss, build_checked_model, check_updates_declared
from orchestrator.train.data.first_samples import first_samples
from orchestrator.train.data.steps import as_dataset

_SAMPLES = 2  # batch norm needs more than one


@dataclass(frozen=True)
class ReturnedMetrics:
    """The names of the metrics that a loss returns in evaluation, the loss itself excluded."""

    sums: Sequence[str]
    updates: Sequence[str]
    """Those that are tuples: the arguments of a metric's ``update``."""
    of_any_batch: bool = False
    """Whether no value of a batch decides which there are: then these are all."""

    @property
    def names(self) -> list[str]:
        return [*self.sums, *self.updates]


def check_validation_metrics(task: Task, watched: str) -> None:
    """Raise UserError if the validation lacks the metric of ``--early-stopping-metric``, or if declared
    metrics with a state and the tuples of the loss do not fit.

    A task whose metrics cannot be found here is checked by the workers, with a batch of their own.
    """
    stateful = [name for name, metric in declared_metrics(task).items() if metric.has_state]
    # Building the model once more has its cost: only where there is something to compare.
    if watched == "loss" and not stateful:
        return
    returned = validation_metrics(task)
    if returned is None:
        return
    if watched not in ("loss", *returned.names):
        raise UserError(missing_metric("--early-stopping-metric", watched, returned.names))
    check_updates_declared(task, returned.updates)
    for name in stateful:
        if returned.of_any_batch and name not in returned.updates:
            raise UserError(missing_update(name))


def validation_metrics(task: Task) -> ReturnedMetrics | None:
    """Return the metrics of the validation; None if they cannot be found."""
    data = task.validation_data() if hasattr(task, "validation_data") else None
    if data is None:
        return None
    batch = first_samples(as_dataset(data), _SAMPLES, split="validation")
    for find in (_metrics_of_fake_loss, _metrics_of_loss):
        found = _unless_it_fails(lambda find=find: find(task, batch))
        if found is not None:
            return found
    return None


def _metrics_of_fake_loss(task: Task, batch: Any) -> ReturnedMetrics:
    cpu = torch.device("cpu")
    with fake_tensor_mode() as mode, cpu:
        found = _metrics(task, build_checked_model(task), to_fake(mode, batch, cpu))
        return replace(found, of_any_batch=True)  # fake tensors have no values


def _metrics_of_loss(task: Task, batch: Any) -> ReturnedMetrics:
    return _metrics(task, build_checked_model(task).cpu(), batch)


@torch.no_grad()
def _metrics(task: Task, model: nn.Module, batch: Any) -> ReturnedMetrics:
    # A task may return other metrics in evaluation than in training.
    model.eval()
    loss, _ = as_loss(task.loss(model, batch), _SAMPLES)
    return ReturnedMetrics(list(loss.metrics), list(loss.updates))


def _unless_it_fails(find: Callable[[], ReturnedMetrics]) -> ReturnedMetrics | None:
    # Not every model runs without data, or on a CPU; an error of the user's code is reported later,
    # with the user's frame.
    try:
        return find()
    except Exception:
        return None
