"""Evaluation: once over the validation data, every sample counted once."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import OrchestratorError, ResourceError
from orchestrator.tasks.load import raised_in_user_code, user_code
from orchestrator.tasks.task import Loss, Task
from orchestrator.train.data import Feed, Micro, cut_batch
from orchestrator.train.memory import free_cached, is_out_of_memory
from orchestrator.train.precision import Precision
from orchestrator.train.step import as_loss, check_device

_FREE_EVERY = 200  # batches of a long evaluation between returns of cached memory


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, feed: Feed, precision: Precision, most_batches: int | None = None) -> dict[str, Any]:
    """Mean loss and metrics over the data: the fields of an ``evaluate`` event."""
    begun, was_training = perf_counter(), model.training
    model.eval()
    sums = _Sums()
    limit = feed.micro_batch
    try:
        for number, micros in enumerate(feed.steps(0)):
            if most_batches is not None and number >= most_batches:
                break
            for micro in micros:
                limit = _add(sums, model, task, micro, precision, feed.world.device, limit)
            if (number + 1) % _FREE_EVERY == 0 and feed.world.device.type == "cuda":
                free_cached(feed.world.device)
    finally:
        model.train(was_training)
    count = max(1.0, float(sums.count))
    means = {name: float(value) / count for name, value in sums.metrics.items()}
    return {"loss": float(sums.loss) / count, "metrics": means, "samples": sums.samples, "seconds": perf_counter() - begun}


@dataclass(frozen=True)
class Evaluation:
    """An evaluation ready to be made, again and again."""

    model: nn.Module
    task: Task
    feed: Feed
    precision: Precision
    most_batches: int | None = None

    def __call__(self) -> dict[str, Any]:
        return evaluate(self.model, self.task, self.feed, self.precision, self.most_batches)


@dataclass
class _Sums:
    loss: float | Tensor = 0.0
    count: int | Tensor = 0
    samples: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)


def _add(sums: _Sums, model: nn.Module, task: Task, micro: Micro, precision: Precision, device: torch.device, limit: int) -> int:
    """Add a batch to the sums, in halves where it does not fit. Returns the size that did fit."""
    batch, done = micro.fetch(), 0
    check_device(batch, device)
    while done < micro.samples:
        size = min(limit, micro.samples - done)
        part = batch if size == micro.samples else cut_batch(batch, done, done + size, micro.samples)
        made = _loss(model, task, part, size, precision)
        if made is None:
            if size == 1:
                raise ResourceError("out of memory in evaluation with a batch of one sample; lower --eval-batch-size or the model's sizes")
            limit = -(-size // 2)
            free_cached(device)
            continue
        loss, weight = made
        sums.loss = sums.loss + loss.sum.double() * weight
        for name, value in loss.metrics.items():
            sums.metrics[name] = sums.metrics[name] + value.double() if name in sums.metrics else value.double()
        sums.count, sums.samples, done = sums.count + loss.count, sums.samples + size, done + size
    return limit


def _loss(model: nn.Module, task: Task, batch: Any, samples: int, precision: Precision) -> tuple[Loss, float] | None:
    """The loss of a batch; None when there is no memory for it."""
    try:
        with precision.autocast():
            return as_loss(task.loss(model, batch), samples)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        if isinstance(error, OrchestratorError) or not raised_in_user_code(error):
            raise
        with user_code("evaluating"):
            raise error
        raise
