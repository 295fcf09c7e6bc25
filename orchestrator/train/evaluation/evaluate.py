"""Evaluation: one pass over the validation data, each sample counted once, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from experts.host_copy import to_host
from experts.moe.context import StepContext
from orchestrator.config.metric import declared_metrics
from orchestrator.errors import OrchestratorError, ResourceError, UserError
from orchestrator.tasks.task import Loss
from orchestrator.tasks.user_code import raised_in_user_code, user_code
from orchestrator.tasks.validate import as_loss
from orchestrator.train.data.steps import Feed, MicroBatch, StepBatch, different_ends
from orchestrator.train.device.batches import check_batch_device, slice_batch
from orchestrator.train.device.memory import free_cached, is_out_of_memory
from orchestrator.train.device.precision import Precision
from orchestrator.train.evaluation.metric_states import MetricStates
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.train.optim.shards import reshard_all
from orchestrator.train.step.out_of_memory import NO_LIMIT
from orchestrator.train.step.totals import Totals, TotalsReducer
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buffers import persistent_buffers

_FREE_EVERY = 200  # batches of a long evaluation between returns of cached memory


@dataclass
class Evaluation:
    """An evaluation that can be repeated. The workers share the samples, and all get the result."""

    strategy: Strategy
    feed: Feed
    precision: Precision
    max_batches: int | None = None
    name: str = "evaluate"
    on_progress: Callable[[], None] = lambda: None
    """Called after each micro-batch."""
    _reduce_totals: TotalsReducer = field(init=False)

    def __post_init__(self) -> None:
        self._reduce_totals = TotalsReducer(self.feed.world, self.name)

    def experts_changed(self) -> None:
        """Count the loads of another number of experts from now on."""
        self._reduce_totals.experts_changed()

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        """Return mean loss and metrics over the data: the fields of an ``evaluate`` event."""
        model = self.strategy.model
        world = self.feed.world
        start = perf_counter()
        was_training = model.training
        # Buffers may differ by worker; the main worker's model is the one that is evaluated.
        world.broadcast(persistent_buffers(model))
        model.eval()
        try:
            states = MetricStates(declared_metrics(self.strategy.task), world.device)
            totals, samples, num_bad = self._local_totals(world.device, states)
        finally:
            model.train(was_training)
            # Gathered weights would be stale where the average was in place of the shards.
            reshard_all(model)
        if world.size > 1:
            totals = self._reduce_totals(totals, samples, votes=[float(samples), float(num_bad)])
            assert totals.votes is not None
            sum_of_samples, num_bad = to_host(totals.votes).tolist()
            if sum_of_samples != samples * world.size:
                raise different_ends(world.rank, f"an evaluation has {samples} samples")
        if totals is None:
            raise UserError(f"none of the {samples} samples of an evaluation can be used: {num_bad} are bad")
        loss = float(to_host(totals.loss))
        count = max(1.0, float(totals.count))
        means = {name: float(value) / count for name, value in totals.metrics.items()}
        return {
            "loss": loss / count,
            "metrics": means | states.compute(world),
            **({"bad_samples": int(num_bad)} if num_bad else {}),
            "samples": samples - int(num_bad),
            "seconds": perf_counter() - start,
        }

    def _local_totals(self, device: torch.device, states: MetricStates) -> tuple[Totals | None, int, int]:
        """Return this worker's sums, the samples of all workers, and those that this one has left out.

        Update the metrics."""
        totals: Totals | None = None
        samples = 0
        num_bad = 0
        limit = NO_LIMIT if self.strategy.lockstep else self.feed.largest_micro_batch
        for number, batch in enumerate(self.feed.steps(0)):
            if self.max_batches is not None and number >= self.max_batches:
                break
            samples += batch.global_samples
            num_bad += len(batch.faults)
            for micro_batch in batch.micro_batches:
                if micro_batch.num_samples or self.strategy.lockstep:
                    more, limit = self._evaluate(micro_batch, states, limit)
                    totals = _add(totals, more)
                self.on_progress()
            if (number + 1) % _FREE_EVERY == 0 and device.type == "cuda":
                free_cached(device)
            self._check_next(batch)
        return totals, samples, num_bad

    def _check_next(self, batch: StepBatch) -> None:
        """Refuse data that ends on some workers only, where the others would wait for them in a pass."""
        world = self.feed.world
        found = batch.next_samples
        if found is None or world.size == 1 or not self.strategy.lockstep:
            return
        most, negated_fewest = world.all_reduce_max([float(found), -float(found)])
        if most != -negated_fewest:
            next_batch = f"the next batch of an evaluation has {found} samples"
            raise different_ends(world.rank, next_batch if found else "an evaluation ends")

    def _evaluate(
        self, micro_batch: MicroBatch, states: MetricStates, limit: int
    ) -> tuple[Totals | None, int]:
        """Return the sums of a micro-batch, and the largest number of samples known to fit in memory.

        A pass that does not fit is repeated in halves. A dummy micro-batch is computed, but has no sums.
        """
        data = micro_batch.fetch()
        device = states.device
        check_batch_device(data, device)
        samples = micro_batch.num_samples or micro_batch.num_dummies
        context = StepContext(dummy=not micro_batch.num_samples)
        totals: Totals | None = None
        done = 0
        while done < samples:
            size = min(limit, samples - done)
            part = data if size == samples else slice_batch(data, done, done + size, samples)
            with self.strategy.context.use_step(context):
                result = self._loss(part, size)
            if result is None:
                if size == 1 or self.strategy.lockstep:
                    raise ResourceError(
                        f"out of memory in evaluation with a batch of {size}; "
                        "lower --eval-batch-size or the model's sizes"
                    )
                limit = -(-size // 2)
                free_cached(device)
                continue
            if micro_batch.num_samples:
                states.update(result[0].updates)
            totals = _add(totals, _double_totals(*result, samples=size))
            done += size
        return totals if micro_batch.num_samples else None, limit

    def _loss(self, batch: Any, samples: int) -> tuple[Loss, float] | None:
        """Return the loss of a batch and its weight; None if memory runs out."""
        try:
            with self.precision.autocast():
                return as_loss(self.strategy.task.loss(self.strategy.model, batch), samples)
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


def _double_totals(loss: Loss, weight: float, samples: int) -> Totals:
    """Return the sums of a batch in fp64, which many batches are added up in."""
    metrics = {name: value.double() for name, value in loss.metrics.items()}
    return Totals(loss.sum.double() * weight, loss.count, metrics, loss.loads, samples)


def _add(totals: Totals | None, more: Totals | None) -> Totals | None:
    if totals is None or more is None:
        return totals or more
    return totals.plus(more)
