"""The interface between the step and a model that may be spread over several workers.

A strategy turns each worker's gradients into the gradient of the global batch. ``Strategy`` itself is the
case of one process; ``ddp``, ``fsdp`` and ``expert_parallel`` override the parts in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from experts.model import attach
from experts.moe.context import MoEContext
from orchestrator.errors import UserError
from orchestrator.tasks.task import Task
from orchestrator.train.optim.gradient_norm import norm_of_gradients


class Strategy:
    """A model in one process, whose gradients need no reduction."""

    lockstep = False
    """Whether a forward pass waits for the other workers; then each must compute every micro-batch."""
    num_expert_grads = 0
    """Number of gradients that live on one worker each, over all workers."""

    def __init__(self, model: nn.Module, task: Task, context: MoEContext | None = None) -> None:
        self.model = model
        self.task = task
        self.context = context or MoEContext()
        attach(model, self.context)
        self._has_sync_batchnorm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())

    @property
    def needs_vote(self) -> bool:
        """Whether workers vote, before gradients are reduced, on whether all of their passes succeeded."""
        return False

    def begin_step(self, all_have_samples: bool) -> None:
        """Prepare for a step; ``all_have_samples`` if every worker has samples in every micro-batch."""
        if not all_have_samples and self._has_sync_batchnorm:
            raise UserError(
                "with --sync-batchnorm every worker needs samples in every micro-batch; the last one of the "
                "epoch is too small: choose a --global-batch-size that leaves a larger rest, or fewer "
                "--workers"
            )

    def loss(self, batch: Any, last: bool) -> Any:  # noqa: ARG002
        """Return the task's loss.

        In the last pass of a step the backward pass may reduce gradients as it runs.
        """
        return self.task.loss(self.model, batch)

    def all_reduce_gradients(self) -> float:
        """Sum gradients over the workers. Return the factor by which they are still too small."""
        return 1.0

    def micro_batch_changed(self) -> None:
        """Treat the micro-batch size as new: it may not fit in memory."""

    def micro_batch_proven(self) -> None:
        """Treat the micro-batch size as one that fits in memory."""

    def local_parts(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return this worker's part of each gradient; the memory is shared."""
        return gradients

    def experts_changed(self) -> None:
        """Take over the parameters of experts and gates that were replaced."""

    def set_trained(self, parameters: Sequence[Tensor]) -> None:
        """Set the parameters of the optimizer. The gradient norm covers these alone."""

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        """Undo the effects of a pass over dummy samples when the block ends."""
        yield

    def rows_fit(self) -> bool:
        """Return whether all tokens reached their experts in this attempt at a step, on all workers."""
        return True

    def expert_grad_squares(self) -> Tensor | None:
        """Return squared norms of gradients that live on one worker each, zero for other workers' ones."""
        return None

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the norm of the global gradient, equal on all workers.

        ``expert_squares`` are summed over them.
        """
        return norm_of_gradients(gradients)

    def exchange_stats(self) -> tuple[float, float, float]:
        """Return bytes and rows sent, and seconds spent, by the token exchange since the last call."""
        return 0.0, 0.0, 0.0
