"""Expert parallel with a sharded dense part: each host has a shard of it, and some of the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from orchestrator.tasks.task import Task
from orchestrator.train.group.world import World
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.optim.shards import local_part
from orchestrator.train.strategies.buffers import BufferChoice, no_buffers, running_statistics
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy
from orchestrator.train.strategies.fsdp import shard_dense_part


class ShardedDenseStrategy(ExpertParallelStrategy):
    """The dense part in shards (FSDP2), which are gathered block by block.

    Gradients are reduced and scattered in every micro-batch: whole ones are never kept."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        world: World,
        chunks: int = 1,
        keep_parameters: bool = False,
        buffers: BufferChoice = no_buffers,
    ) -> None:
        """The model's experts are placed already. ``keep_parameters`` as in ``shard_model``."""
        # Each host keeps a shard of its own copy. The base class makes the copies equal first.
        super().__init__(model, task, world, chunks, None, buffers)
        shard_dense_part(model, self._gradient_group, world.device, keep_parameters)
        self._find_parameters()

    def _reduced_parameters(self) -> list[nn.Parameter]:
        return []  # FSDP2 reduces the gradients of its shards

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        """Restore running statistics. Gradients of dummy samples are zero, and summed with the others."""
        statistics = [(buffer, buffer.clone()) for buffer in running_statistics(self.model)]
        yield
        for buffer, before in statistics:
            buffer.copy_(before)

    def local_parts(self, gradients: list[Tensor]) -> list[Tensor]:
        return [local_part(gradient) for gradient in gradients]

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        trained = [p.grad for p in self._dense if p.grad is not None and id(p) in self._trained_ids]
        own_square = norm_of_gradients(self.local_parts(trained)).to(self.world.device).square()
        dense_square = self.world.all_reduce(own_square.reshape(1))
        if expert_squares is None:
            return dense_square.sum().sqrt()
        return torch.cat([dense_square, expert_squares]).sum().sqrt()
