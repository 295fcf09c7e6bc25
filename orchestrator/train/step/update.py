"""The end of a step: gradients are summed over all workers, divided and clipped, and the weights updated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from experts.balance import update_balance
from orchestrator.errors import OutOfMemory, ResourceError, UserError
from orchestrator.train.data.steps import StepBatch, different_ends
from orchestrator.train.device.memory import is_out_of_memory
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.requests import Votes
from orchestrator.train.group.world import World
from orchestrator.train.optim.optimizer import ScheduledOptimizer, clip_factor
from orchestrator.train.optim.shards import is_sharded, local_part
from orchestrator.train.step.out_of_memory import StepRecovery
from orchestrator.train.step.totals import Totals, TotalsReducer
from orchestrator.train.strategies.base import Strategy


@dataclass(frozen=True)
class WeightUpdate:
    """Updates the weights by the summed gradients of a step."""

    strategy: Strategy
    optimizer: ScheduledOptimizer
    precision: Precision
    clip_norm: float

    def apply(self, totals: Totals, step: int) -> None:
        """Update weights and balance. It cannot be repeated: part of it may have happened when it fails."""
        try:
            self._divide_clip_and_step(totals, step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ResourceError(
                f"out of memory in the optimizer at step {step + 1}: its state does not fit next to the "
                "model; try a smaller model, or a device with more memory"
            ) from None
        if totals.loads:
            update_balance(self.strategy.model, totals.loads, totals.finite)

    def _divide_clip_and_step(self, totals: Totals, step: int) -> None:
        """Divide gradients by the count of the global batch, clip them, and update the weights."""
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        if is_sharded(self.strategy.model):
            gradients = [local_part(gradient) for gradient in gradients]
        count = totals.count
        count = count.double().clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        factor: float | Tensor = totals.nominal_count / count
        if self.precision.scale is not None:
            factor = factor / self.precision.scale.double()
        norm = self.strategy.gradient_norm(gradients, totals.expert_grad_squares)
        totals.norm, factor = clip_factor(norm, factor, self.clip_norm)
        self.optimizer.scale_gradients(gradients, factor)
        if self.precision.scale is not None:
            # The norm covers the gradients of all workers, so all of them find the same overflows.
            totals.finite = totals.norm.isfinite()
        self.optimizer.step(step, totals.finite)
        if totals.finite is not None:
            self.precision.update(totals.finite)


class StepReduction:
    """Sums gradients and totals over the workers, after the last micro-batch of a step."""

    def __init__(self, world: World, strategy: Strategy, recovery: StepRecovery) -> None:
        self._world = world
        self._strategy = strategy
        self._recovery = recovery
        self._reduce_totals = TotalsReducer(world, "step", strategy.num_expert_grads)

    def experts_changed(self) -> None:
        self._reduce_totals.experts_changed(self._strategy.num_expert_grads)

    def reduce(self, totals: Totals | None, batch: StepBatch, votes: Votes, nominal_count: float) -> Totals:
        """Return the sums of all workers; gradients are summed in place.

        ``nominal_count`` is the number by which this worker has divided its gradients."""
        if self._world.size == 1 and not self._strategy.reproducible:
            assert totals is not None
            return _of_one_process(totals, batch, nominal_count)
        factor = self._sum_gradients()
        global_totals = self._reduce_totals(
            totals,
            batch.global_samples,
            (*votes, float(batch.next_samples or 0)),
            self._strategy.expert_grad_squares(),
            self._strategy.exchange_stats(),
            batch.num_parts if self._strategy.reproducible else 0,
        )
        assert global_totals.votes is not None
        self._check_next(batch, global_totals.votes[-1])
        global_totals.votes = global_totals.votes[:-1]
        global_totals.nominal_count = nominal_count * factor
        return global_totals

    def _sum_gradients(self) -> float:
        try:
            return self._strategy.all_reduce_gradients()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._strategy.reproducible:
                raise self._recovery.no_smaller_passes("in the sum of gradients") from None
            raise OutOfMemory(
                f"worker {self._world.rank} ran out of memory in the sum of gradients",
                self._recovery.pass_samples,
            ) from None

    def _check_next(self, batch: StepBatch, total: Tensor) -> None:
        """Refuse data that ends on some workers only. ``total`` sums the samples of all next batches.

        Workers whose data goes on would wait for the others in the next step."""
        samples = batch.next_samples
        if samples is None:
            return
        # On a GPU reading the sum waits for the device: only a worker near its end does.
        may_end = samples < batch.global_samples
        if (may_end or self._world.device.type == "cpu") and float(total) != samples * self._world.size:
            found = f"the next step has {samples} samples" if samples else "the epoch ends"
            raise different_ends(self._world.rank, found)


def _of_one_process(totals: Totals, batch: StepBatch, nominal_count: float) -> Totals:
    totals.samples = batch.global_samples
    totals.nominal_count = nominal_count
    has_samples = any(micro_batch.num_samples for micro_batch in batch.micro_batches)
    if isinstance(totals.count, int) and totals.count < 1 and has_samples:
        raise UserError(f"the task's loss counts {totals.count} in a step; a mean needs at least 1")
    return totals
