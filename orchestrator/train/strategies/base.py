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
from experts.moe.bank import ExpertBank, SizeClass
from experts.moe.context import MoEContext
from experts.tokens.exchange import GroupExchange
from orchestrator.errors import UserError
from orchestrator.tasks.task import Task
from orchestrator.train.optim.gradient_norm import norm_of_gradients

MORE_ROWS = "more rows than their bound (--exchange-rows)"
"""Why a step of expert hosts is repeated whose rows were cut."""


class Strategy:
    """A model in one process, whose gradients need no reduction."""

    lockstep = False
    """Whether a forward pass waits for the other workers; then each must compute every micro-batch."""
    reproducible = False
    """Whether each micro-batch is computed and counted by itself, so that no bit depends on the workers."""
    num_expert_grads = 0
    """Number of gradients that live on one worker each, over all workers."""

    def __init__(self, model: nn.Module, task: Task, context: MoEContext | None = None) -> None:
        self.model = model
        self.task = task
        self.context = context or MoEContext()
        attach(model, self.context)
        exchange = self.context.exchange
        self._exchange = exchange if isinstance(exchange, GroupExchange) else None
        """The exchange of tokens with other hosts; None where no expert lives on another one."""
        self._trained_ids = {id(p) for p in model.parameters()}
        self._has_sync_batchnorm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())

    @property
    def needs_vote(self) -> bool:
        """Whether workers vote, before gradients are reduced, on whether all of their passes succeeded."""
        return False

    @property
    def grid_exponent(self) -> int | None:
        """The exponent of the grid of exact sums in the next step, part of the state; None without any."""
        return None

    @grid_exponent.setter
    def grid_exponent(self, exponent: int | None) -> None:
        del exponent

    def begin_step(self, all_have_samples: bool) -> None:
        """Prepare for a step; ``all_have_samples`` if every worker has samples in every micro-batch."""
        if not all_have_samples and self._has_sync_batchnorm:
            raise UserError(
                "with --sync-batchnorm every worker needs samples in every micro-batch; the last one of the "
                "epoch is too small: choose a --global-batch-size that leaves a larger rest, or fewer "
                "--workers"
            )
        if self._exchange is not None:
            self._exchange.meter.take()  # drop the costs of an evaluation
        if self.context.bounds is not None:
            self.context.bounds.begin_attempt()

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

    def experts_changed(self) -> None:
        """Take over the parameters of experts and gates that were replaced."""
        if self.context.bounds is not None:
            self.context.bounds.forget()

    def set_trained(self, parameters: Sequence[Tensor]) -> None:
        """Set the parameters of the optimizer. The gradient norm covers these alone."""
        self._trained_ids = {id(p) for p in parameters}

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        """Undo the effects of a pass over dummy samples when the block ends."""
        yield

    def why_repeat(self, expert_squares: Tensor | None) -> str | None:  # noqa: ARG002
        """Return why this attempt at a step must be repeated, the same on all workers; None if it counts.

        The gradients are summed over the workers, and so are ``expert_squares``."""
        bounds = self.context.bounds
        if bounds is None or self._exchange is None or bounds.end_attempt(self._exchange.group):
            return None
        return MORE_ROWS

    def expert_grad_squares(self) -> Tensor | None:
        """Return squared norms of gradients that live on one worker each, zero for other workers' ones."""
        return None

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the norm of the global gradient, equal on all workers.

        ``expert_squares`` are summed over them.
        """
        return norm_of_gradients(gradients)

    def close(self) -> None:
        """Let go of the model, which its owner may train further."""

    def exchange_stats(self) -> tuple[float, float, float]:
        """Return bytes and rows sent, and seconds spent, by the token exchange since the last call."""
        if self._exchange is None:
            return 0.0, 0.0, 0.0
        sent, rows, seconds = self._exchange.meter.take()
        return float(sent), float(rows), seconds


def placed_stacks(banks: Sequence[ExpertBank]) -> Iterator[tuple[ExpertBank, SizeClass, nn.Parameter, int]]:
    """Yield each stack of experts with the position of its role's first weight among all weights of experts.

    Each weight of an expert has one position, by layer, role and row, whatever its host."""
    begin = 0
    for bank in banks:
        for group, role, stack in bank.stacks():
            yield bank, group, stack, begin + bank.form.roles.index(role) * len(bank.sizes)
        begin += num_weights(bank)


def num_weights(bank: ExpertBank) -> int:
    """Return the number of weights of a bank's experts, those on other hosts included."""
    return len(bank.form.roles) * len(bank.sizes)
