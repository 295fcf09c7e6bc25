"""Evaluation: once over the validation data, every sample counted once."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import OrchestratorError
from orchestrator.tasks.load import user_code
from orchestrator.tasks.task import Loss, Task
from orchestrator.train.data import Feed
from orchestrator.train.memory import free_cached
from orchestrator.train.precision import Precision
from orchestrator.train.step import as_loss, check_device

_FREE_EVERY = 200  # batches of a long evaluation between returns of cached memory


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, feed: Feed, precision: Precision, most_batches: int | None = None) -> dict[str, Any]:
    """Mean loss and metrics over the data: the fields of an ``evaluate`` event."""
    begun, was_training = perf_counter(), model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    count: int | Tensor = 0
    samples = 0
    try:
        for number, micros in enumerate(feed.steps(0)):
            if most_batches is not None and number >= most_batches:
                break
            for micro in micros:
                loss, weight = _loss(model, task, micro.fetch(), micro.samples, precision, feed.world.device)
                for name, value in {"loss": loss.sum * weight, **loss.metrics}.items():
                    sums[name] = sums[name] + value.double() if name in sums else value.double()
                count, samples = count + loss.count, samples + micro.samples
            if (number + 1) % _FREE_EVERY == 0 and feed.world.device.type == "cuda":
                free_cached(feed.world.device)
    finally:
        model.train(was_training)
    means = {name: float(value) / float(count) for name, value in sums.items()}
    return {"loss": means.pop("loss"), "metrics": means, "samples": samples, "seconds": perf_counter() - begun}


def _loss(model: nn.Module, task: Task, batch: Any, samples: int, precision: Precision, device: torch.device) -> tuple[Loss, float]:
    check_device(batch, device)
    try:
        with precision.autocast():
            return as_loss(task.loss(model, batch), samples)
    except (OrchestratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        with user_code("evaluating"):
            raise error
        raise
