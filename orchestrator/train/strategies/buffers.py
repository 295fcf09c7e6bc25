"""Buffers of a model: those that workers share, and the running statistics of its norms."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

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
