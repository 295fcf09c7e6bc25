"""Replicated data parallel: the whole model on each worker.

Gradients are all-reduced after the backward pass until a micro-batch has proved to fit in memory. Then
torch's DDP reduces them while the backward pass runs: that is faster, but no worker can recover from
running out of memory in it. It refuses gradients in fp32 of weights in bf16, which are always reduced after
the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.config.sections.parallel import ParallelSettings
from orchestrator.errors import TrainingFailed
from orchestrator.tasks.task import Loss, Task
from orchestrator.train.device.short_weights import is_shortened
from orchestrator.train.group.world import World
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buckets import BUCKET_MB, gradient_buckets
from orchestrator.train.strategies.buffers import BufferChoice, no_buffers, persistent_buffers

STEPS_BEFORE_OVERLAP = 20
"""Steps that a micro-batch must fit in memory before reductions overlap with the backward pass."""


class DDPStrategy(Strategy):
    """The whole model on each worker; gradients are all-reduced."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        world: World,
        settings: ParallelSettings,
        warn: Callable[[str], None],
        buffers: BufferChoice = no_buffers,
    ) -> None:
        super().__init__(model, task)
        self.world = world
        self.settings = settings
        self._choose_buffers = buffers
        self.lockstep = self._has_sync_batchnorm
        self._warn = warn
        self._find_parameters()
        self._steps_survived = 0
        self._all_have_samples = True
        self._has_unused_parameters = False
        self._reduced_by_ddp = False
        self._ddp: DistributedDataParallel | None = None
        world.broadcast([tensor.detach() for tensor in [*model.parameters(), *persistent_buffers(model)]])

    def _find_parameters(self) -> None:
        """Find the trained parameters, and the buffers to broadcast."""
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._buffers = self._choose_buffers(self.model)

    @property
    def needs_vote(self) -> bool:
        return not self._may_overlap and not self.lockstep

    @property
    def _may_overlap(self) -> bool:
        return self._steps_survived >= STEPS_BEFORE_OVERLAP and not is_shortened(self.model)

    def micro_batch_changed(self) -> None:
        self._steps_survived = 0

    def micro_batch_proven(self) -> None:
        self._steps_survived = max(self._steps_survived, STEPS_BEFORE_OVERLAP)

    def experts_changed(self) -> None:
        self._find_parameters()
        if self._ddp is not None:
            # Its hooks would go on reducing the parameters that stay.
            self._ddp.reducer._remove_autograd_hooks()
            self._ddp = None

    def begin_step(self, all_have_samples: bool) -> None:
        super().begin_step(all_have_samples)
        self._all_have_samples = all_have_samples
        self._reduced_by_ddp = False
        self.world.broadcast(self._buffers)

    def loss(self, batch: Any, last: bool) -> Any:
        overlaps = last and self._all_have_samples and self._may_overlap and not self._has_unused_parameters
        if not overlaps:
            return super().loss(batch, last)
        if self._ddp is None:
            self._ddp = self._wrap_model()
        self._reduced_by_ddp = True
        scalar, result = self._ddp(batch)
        return _replace_sum(result, scalar)

    def _wrap_model(self) -> DistributedDataParallel:
        settings = self.settings
        return DistributedDataParallel(
            _LossModule(self.task, self.model),
            # Buffers are broadcast once per step in begin_step, not in every forward pass.
            **_without_buffer_sync(),
            init_sync=False,  # the constructor has broadcast the weights
            process_group=self.world.torch_group("data"),
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )

    def all_reduce_gradients(self) -> float:
        self._steps_survived += 1
        if self._reduced_by_ddp:
            self._check_reduction()
            return float(self.world.size)  # DDP has summed, and divided by the number of workers
        self._fill_missing_gradients()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for bucket in gradient_buckets(gradients, self.settings.bucket_cap_mb or BUCKET_MB):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            self.world.all_reduce(flat)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, part in zip(bucket, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))
        return 1.0

    def _check_reduction(self) -> None:
        """Raise if DDP left gradients unreduced in this step.

        DDP notices a parameter without a gradient only when the next step begins, and until then silently
        leaves the rest of its bucket unreduced. ``_rebuild_buckets`` makes that check before the update.
        """
        assert self._ddp is not None
        try:
            self._ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise TrainingFailed(
                "a parameter got no gradient in this step, though it had one in the first steps, and the "
                "workers' gradients could not be summed; nothing was updated. Use --find-unused-parameters, "
                "and continue with orchestrator resume FOLDER"
            ) from None

    def _fill_missing_gradients(self) -> None:
        """Give a parameter a zero gradient on this worker if another worker has one.

        A parameter without a gradient on any worker stays without, as in one process.
        """
        has_gradient = [float(p.grad is not None) for p in self._parameters]
        lacks_gradient = [1.0 - value for value in has_gradient]
        anywhere = self.world.all_reduce_max([*has_gradient, *lacks_gradient])
        for parameter, has_somewhere in zip(self._parameters, anywhere, strict=False):
            if has_somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        num_lacking = sum(anywhere[len(has_gradient) :])
        if not num_lacking or not self._all_have_samples or self._has_unused_parameters:
            return
        if not self.settings.find_unused_parameters:
            self._has_unused_parameters = True
            self._warn(
                f"{num_lacking:.0f} of {len(has_gradient)} parameters got no gradient in a step: gradients "
                "are summed after the backward pass, not during it; --find-unused-parameters lets DDP look "
                "for such parameters in each step"
            )


def _without_buffer_sync() -> dict[str, Any]:
    """Return the argument that turns DDP's own buffer broadcasts off; its name depends on torch's version."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


class _LossModule(nn.Module):
    """The module that DDP wraps. It computes the task's loss, so the task sees its own model."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self._task = task
        self.model = model

    def forward(self, batch: Any) -> Any:
        result = self._task.loss(self.model, batch)
        return _loss_sum(result), result


def _loss_sum(result: Any) -> Any:
    """Return the scalar to differentiate, from any form that a task's loss may have."""
    if isinstance(result, Loss):
        return result.sum
    return result[0] if isinstance(result, tuple) else result


def _replace_sum(result: Any, scalar: Any) -> Any:
    """Return the loss with DDP's scalar: with a static graph, the reduction hangs on that tensor."""
    if isinstance(result, Loss):
        return replace(result, sum=scalar)
    return (scalar, *result[1:]) if isinstance(result, tuple) else scalar
