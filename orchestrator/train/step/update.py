"""The end of a step: gradients are divided and clipped, and the weights are updated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from experts.balance import update_balance
from orchestrator.errors import ResourceError
from orchestrator.train.device.memory import is_out_of_memory
from orchestrator.train.device.precision import Precision
from orchestrator.train.optim.optimizer import ScheduledOptimizer, clip_factor
from orchestrator.train.step.totals import Totals
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
        gradients = self.strategy.local_parts(gradients)
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
