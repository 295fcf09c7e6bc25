"""Sums of a step's gradients and totals over all workers."""

from __future__ import annotations

from torch import Tensor

from orchestrator.errors import OutOfMemory, UserError
from orchestrator.train.data.steps import StepBatch, different_ends
from orchestrator.train.device.memory import is_out_of_memory
from orchestrator.train.group.requests import Votes
from orchestrator.train.group.world import World
from orchestrator.train.step.out_of_memory import StepRecovery
from orchestrator.train.step.totals import Totals, TotalsReducer
from orchestrator.train.strategies.base import Strategy


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
        if self._world.size == 1:
            assert totals is not None
            return _of_one_process(totals, batch, nominal_count)
        factor = self._sum_gradients()
        global_totals = self._reduce_totals(
            totals,
            batch.global_samples,
            (*votes, float(batch.next_samples or 0)),
            self._strategy.expert_grad_squares(),
            self._strategy.exchange_stats(),
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
