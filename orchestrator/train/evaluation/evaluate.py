"""Evaluation: one pass over the validation data, each sample counted once, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from experts.host_copy import to_host
from experts.model import mix
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
from orchestrator.train.stepper import seed_torch
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
    """The most batches; of a reproducible run, the most micro-batches of all workers."""
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
            metrics = declared_metrics(self.strategy.task)
            states = MetricStates(metrics, world.device, self.strategy.reproducible)
            totals, samples, num_bad = self._local_totals(world.device, states)
        finally:
            model.train(was_training)
            # Gathered weights would be stale where the average was in place of the shards.
            reshard_all(model)
        exactly = self.strategy.reproducible
        if world.size > 1 or (exactly and totals is not None):
            num_parts = self._num_parts(samples) if exactly else 0
            votes = [float(samples), float(num_bad)]
            totals = self._reduce_totals(totals, samples, votes, num_parts=num_parts)
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
        parts: list[tuple[int, Totals]] = []
        samples = 0
        num_bad = 0
        limit = NO_LIMIT if self._is_whole else self.feed.largest_micro_batch
        for number, batch in enumerate(self.feed.steps(0)):
            batch = self._within_limit(batch, number, samples)
            if batch is None:
                break
            first_part = self._num_parts(samples)
            samples += batch.global_samples
            num_bad += len(batch.faults)
            for micro_batch in batch.micro_batches:
                if micro_batch.num_samples or self.strategy.lockstep:
                    part = first_part + micro_batch.number
                    more, limit = self._evaluate(micro_batch, states, limit, part)
                    totals = _add(totals, more)
                    if self.strategy.reproducible and more is not None:
                        parts.append((part, replace(more, loads=())))
                self.on_progress()
            if (number + 1) % _FREE_EVERY == 0 and device.type == "cuda":
                free_cached(device)
            self._check_next(batch)
        if totals is not None and parts:
            totals = replace(totals, parts=tuple(parts))
        return totals, samples, num_bad

    @property
    def _is_whole(self) -> bool:
        """Whether no pass may be divided: others wait for it, or its bits would depend on the division."""
        return self.strategy.lockstep or self.strategy.reproducible

    def _num_parts(self, samples: int) -> int:
        """Return the micro-batches of so many samples of the data, where each is computed by one worker."""
        return -(-samples // self.feed.micro_batch)

    def _within_limit(self, batch: StepBatch, number: int, samples: int) -> StepBatch | None:
        """Return the part of a batch that is evaluated; None if nothing is.

        ``number`` batches with so many ``samples`` came before it. A batch of more workers has more samples,
        but a reproducible run evaluates the same ones on any number of them."""
        if self.max_batches is None:
            return batch
        if not self.strategy.reproducible:
            return batch if number < self.max_batches else None
        rest = self.max_batches * self.feed.micro_batch - samples
        return _first_samples(batch, rest) if rest > 0 else None

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
        self, micro_batch: MicroBatch, states: MetricStates, limit: int, number: int = 0
    ) -> tuple[Totals | None, int]:
        """Return the sums of a micro-batch, and the largest number of samples known to fit in memory.

        ``number`` is that of the micro-batch in the whole evaluation, where one worker computes it. A pass
        that does not fit is repeated in halves. A dummy micro-batch is computed, but has no sums.
        """
        data = micro_batch.fetch()
        device = states.device
        if self.strategy.reproducible:
            # A task may draw in its loss; training seeds each micro-batch anew.
            seed_torch(mix(number, "evaluation"), device)
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
                if size == 1 or self._is_whole:
                    raise ResourceError(
                        f"out of memory in evaluation with a batch of {size}; "
                        "lower --eval-batch-size or the model's sizes"
                    )
                limit = -(-size // 2)
                free_cached(device)
                continue
            if micro_batch.num_samples:
                states.update(result[0].updates, number)
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


def _first_samples(batch: StepBatch, limit: int) -> StepBatch:
    """Return a batch without the micro-batches after its first samples: these become dummies.

    ``limit`` is at a border of micro-batches."""
    if batch.global_samples <= limit:
        return batch
    micro_batches = [
        each
        if each.first_sample < limit
        else replace(each, num_samples=0, num_dummies=each.num_samples or each.num_dummies)
        for each in batch.micro_batches
    ]
    return replace(batch, micro_batches=micro_batches, global_samples=limit)


def _double_totals(loss: Loss, weight: float, samples: int) -> Totals:
    """Return the sums of a batch in fp64, which many batches are added up in."""
    metrics = {name: value.double() for name, value in loss.metrics.items()}
    return Totals(loss.sum.double() * weight, loss.count, metrics, loss.loads, samples)


def _add(totals: Totals | None, more: Totals | None) -> Totals | None:
    if totals is None or more is None:
        return totals or more
    return totals.plus(more)
