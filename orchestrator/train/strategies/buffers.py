"""Buffers of a model: those that workers share, and the statistics that a forward pass changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from experts.balance import gated_layers
from experts.moe.context import MoEContext
from orchestrator.errors import UserError

BufferChoice = Callable[[nn.Module], list[Tensor]]
"""Returns the buffers of a model that the main worker broadcasts at the start of each step.

A function, because a change of the experts replaces some of them."""


def no_buffers(_: nn.Module) -> list[Tensor]:
    return []


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers in the model's state.

    Others, such as the placement of experts, may differ by worker.
    """
    names = set(model.state_dict())
    return [buffer for name, buffer in model.named_buffers() if name in names]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of batch and instance norms: the buffers that a forward pass changes."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Make batch norm use the statistics of the micro-batches of all workers."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("--sync-batchnorm: the model has no batch norm; remove the option")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model, dist.group.WORLD)


class StepStatistics:
    """The running statistics of norms, and the statistics of routing, with a copy of each to put back.

    A step that is repeated must find them as they were, and one that is skipped leaves them so."""

    def __init__(self, model: nn.Module, context: MoEContext) -> None:
        layers = [layer for _, layer in gated_layers(model)]
        routing = [b for layer in layers if layer.statistics is not None for b in layer.statistics.of_step]
        self._running = [(buffer.detach().clone(), buffer) for buffer in running_statistics(model)]
        self._routing = [(buffer.clone(), buffer) for buffer in routing]
        self._context = context
        self._is_saved = False

    @property
    def _changing(self) -> list[tuple[Tensor, Tensor]]:
        """Return the copies and the buffers that this step changes."""
        return [*self._running, *self._routing] if self._context.observing else self._running

    def save(self) -> None:
        self._is_saved = True
        for copy, buffer in self._changing:
            copy.copy_(buffer)

    def forget(self) -> None:
        """Begin an attempt that has not saved anything yet."""
        self._is_saved = False

    def restore(self, finite: Tensor | None = None) -> None:
        """Put the statistics back, if this attempt has saved them; with ``finite``, only if that is false."""
        if self._is_saved:
            for copy, buffer in self._changing:
                buffer.copy_(copy if finite is None else torch.where(finite, buffer, copy))
