"""Evaluation: once over the validation data, every sample counted once, whatever the number of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from experts.context import StepContext
from orchestrator.errors import OrchestratorError, ResourceError
from orchestrator.tasks.load import raised_in_user_code, user_code
from orchestrator.tasks.task import Loss
from orchestrator.train.data import Feed, MicroBatch, slice_batch
from orchestrator.train.parts.comm_errors import is_communication_error
from orchestrator.train.parts.memory import free_cached, is_out_of_memory
from orchestrator.train.parts.precision import Precision
from orchestrator.train.step import NO_LIMIT, as_loss, check_device
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buffers import persistent_buffers
from orchestrator.train.totals import Totals, TotalsReducer

_FREE_EVERY = 200  # batches of a long evaluation between returns of cached memory


@dataclass
class Evaluation:
    """An evaluation ready to be made, again and again: shared out among the workers, who all get the result."""

    strategy: Strategy
    feed: Feed
    precision: Precision
    max_batches: int | None = None
    name: str = "evaluate"
    _sums: TotalsReducer = field(init=False)

    def __post_init__(self) -> None:
        self._sums = TotalsReducer(self.feed.world, self.name)

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        """Mean loss and metrics over the data: the fields of an ``evaluate`` event."""
        model, world = self.strategy.model, self.feed.world
        begun, was_training = perf_counter(), model.training
        world.broadcast(persistent_buffers(model))  # one model is evaluated, not one per worker
        model.eval()
        try:
            totals, samples = self._totals(world.device)
        finally:
            model.train(was_training)
        if world.size > 1:
            totals = self._sums(totals, samples)
        assert totals is not None
        count = max(1.0, float(totals.count))
        means = {name: float(value) / count for name, value in totals.metrics.items()}
        return {
            "loss": float(totals.loss) / count,
            "metrics": means,
            "samples": samples,
            "seconds": perf_counter() - begun,
        }

    def _totals(self, device: torch.device) -> tuple[Totals | None, int]:
        """This worker's sums, and the samples of all."""
        totals, samples = None, 0
        limit = NO_LIMIT if self.strategy.lockstep else self.feed.largest_micro_batch
        for number, portion in enumerate(self.feed.steps(0)):
            if self.max_batches is not None and number >= self.max_batches:
                break
            samples += portion.global_samples
            for micro in portion.micro_batches:
                if micro.num_samples or self.strategy.lockstep:
                    more, limit = self._batch(micro, device, limit)
                    totals = more if totals is None else totals if more is None else totals.plus(more)
            if (number + 1) % _FREE_EVERY == 0 and device.type == "cuda":
                free_cached(device)
        return totals, samples

    def _batch(self, micro: MicroBatch, device: torch.device, limit: int) -> tuple[Totals | None, int]:
        """The sums of a batch, in halves where it does not fit, and the size that did fit. A stand-in counts for nothing."""
        batch, done, samples = micro.fetch(), 0, micro.num_samples or micro.num_dummies
        totals: Totals | None = None
        check_device(batch, device)
        context = StepContext(dummy=not micro.num_samples)
        while done < samples:
            size = min(limit, samples - done)
            part = batch if size == samples else slice_batch(batch, done, done + size, samples)
            with self.strategy.context.use_step(context):
                made = _loss(self.strategy, part, size, self.precision)
            if made is None:
                if size == 1 or self.strategy.lockstep:
                    raise ResourceError(
                        f"out of memory in evaluation with a batch of {size}; lower --eval-batch-size or the model's sizes"
                    )
                limit = -(-size // 2)
                free_cached(device)
                continue
            loss, weight = made
            more = Totals(
                loss.sum.double() * weight,
                loss.count,
                {name: value.double() for name, value in loss.metrics.items()},
                loss.loads,
                size,
            )
            totals = more if totals is None else totals.plus(more)
            done += size
        return totals if micro.num_samples else None, limit


def _loss(replica: Strategy, batch: Any, samples: int, precision: Precision) -> tuple[Loss, float] | None:
    """The loss of a batch; None when there is no memory for it."""
    try:
        with precision.autocast():
            return as_loss(replica.task.loss(replica.model, batch), samples)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        if (
            isinstance(error, OrchestratorError)
            or is_communication_error(error)
            or not raised_in_user_code(error)
        ):
            raise
        with user_code("evaluating"):
            raise error
        raise
