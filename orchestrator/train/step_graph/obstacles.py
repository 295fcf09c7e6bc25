"""Obstacles to the capture of steps that are known before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experts.balance import gated_layers, moe_layers
from experts.moe.token_dropout import token_dropouts
from orchestrator.train.device.precision import Precision
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.optimizer import has_fp64
from orchestrator.train.step_graph.python_state import find_hook
from orchestrator.train.strategies.base import Strategy

_OPTIMIZERS = (AdamW, torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def find_obstacle(
    strategy: Strategy, optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device
) -> str | None:
    """Return why the steps of this model cannot be captured; None if there is no known obstacle."""
    if hasattr(strategy.task, "prepare_step"):
        return "the task looks at each step before it is trained (prepare_step)"
    hook = find_hook(strategy.model)
    if hook is not None:
        return f"{hook} has a hook, which a graph would not call"
    return _optimizer_obstacle(optimizer) or _experts_obstacle(strategy.model, precision, device)


def _optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    handle: Any = optimizer
    name = type(optimizer).__name__
    if type(optimizer) not in _OPTIMIZERS or not all(group.get("fused") for group in optimizer.param_groups):
        return f"{name} does not run in one kernel: only fused AdamW, Adam and SGD can be captured"
    if handle._optimizer_step_pre_hooks or handle._optimizer_step_post_hooks:
        return f"{name} has a hook, which a graph would not call"
    if has_fp64(p for group in optimizer.param_groups for p in group["params"]):
        return "the weights are in fp64, and a graph reads the learning rate in fp32"
    return None


def _experts_obstacle(model: nn.Module, precision: Precision, device: torch.device) -> str | None:
    for name, _ in token_dropouts(model):
        return f"the dropout {name} depends on the step"
    for name, layer in gated_layers(model):
        if layer.jitter:
            return f"the noise of the gate {name} depends on the step"
        if layer.statistics is not None or layer.twin_E is not None:
            return f"the experts of {name} may change in training"
    for name, layer in moe_layers(model):
        if layer.capacity is not None:
            return f"the host counts the rows that a capacity leaves to {name}"
        dtype = precision.dtype or next(layer.bank.parameters()).dtype
        if layer.bank.waits_for_counts(device, dtype):
            return f"the host counts the rows of the experts of {name}: of several sizes, or in a loop"
    return None
