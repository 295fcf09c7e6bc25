"""Optimizers by name, over the parameters of a model in two groups: matrices, and norms and biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from experts.bank import ExpertBank
from orchestrator.config.optim import OptimSettings
from orchestrator.train.parts.adamw import AdamW
from orchestrator.train.parts.adamw8bit import AdamW8bit
from orchestrator.train.parts.muon import Muon
from orchestrator.train.parts.optim import has_fp64


def build_named_optimizer(
    model: nn.Module,
    settings: OptimSettings,
    fused: bool,
    trained: Iterable[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name.

    ``trained`` are the model's trainable parameters, unless given. All hosts have the same groups,
    also one that holds no parameter of a group."""
    parameters = [p for p in (model.parameters() if trained is None else trained) if p.requires_grad]
    dims = _matrix_dims(model)
    matrices = [p for p in parameters if dims.get(id(p), p.ndim) >= 2]
    others = [p for p in parameters if dims.get(id(p), p.ndim) < 2]
    lr = settings.peak_learning_rate
    decay = settings.weight_decay
    # Decay keeps the weights of products small; a norm's scale or a bias should not tend to zero.
    other_decay = decay if settings.decay_biases else 0.0
    other_group = {"params": others, "weight_decay": other_decay}
    groups = _apart([{"params": matrices, "weight_decay": decay}, other_group])
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum_used, fused=fused)
    if settings.optimizer == "adamw":
        return build_adamw(groups, settings, fused)
    if settings.optimizer == "adamw8bit":
        return AdamW8bit(groups, lr=lr, betas=settings.betas, eps=settings.eps)
    # Rows of an embedding are looked up, not multiplied: AdamW trains them.
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables = [p for p in matrices if id(p) in embedded]
    matrices = [p for p in matrices if id(p) not in embedded]
    adamw_groups = [{"params": tables, "weight_decay": decay}, other_group]
    adamw = torch.optim.AdamW(adamw_groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)
    return Muon(matrices, adamw, lr, momentum=settings.momentum_used, weight_decay=decay)


def build_adamw(groups: list[dict[str, Any]], settings: OptimSettings, fused: bool) -> torch.optim.AdamW:
    """Build AdamW: our own for whole parameters on a GPU, else torch's, with the same state.

    Not our own in fp64: torch's kernel takes the factor of gradients in fp32, which would round them."""
    parameters = [p for group in groups for p in group["params"]]
    whole_on_gpu = all(p.is_cuda and not hasattr(p, "to_local") for p in parameters)
    if fused and whole_on_gpu and not has_fp64(parameters):
        return AdamW(groups, settings.peak_learning_rate, settings.betas, settings.eps)
    rate = settings.peak_learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps, fused=fused)


def _apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with sharded parameters in groups of their own, where only some are sharded.

    Torch updates the parameters of a group together, and refuses shards next to whole ones. ``same_as``
    is the number of the group with the same settings: checkpoints know that one alone."""
    sharded = [[p for p in group["params"] if hasattr(p, "to_local")] for group in groups]
    num_sharded = sum(len(parameters) for parameters in sharded)
    if num_sharded in (0, sum(len(group["params"]) for group in groups)):
        return groups
    whole = [[p for p in group["params"] if not hasattr(p, "to_local")] for group in groups]
    first = [group | {"params": parameters} for group, parameters in zip(groups, whole, strict=True)]
    second = [
        group | {"params": parameters, "same_as": number}
        for number, (group, parameters) in enumerate(zip(groups, sharded, strict=True))
    ]
    return [*first, *second]


def _matrix_dims(model: nn.Module) -> dict[int, int]:
    """Return the dimensions of each expert's part of a stacked parameter, by the parameter's id."""
    banks = [module for module in model.modules() if isinstance(module, ExpertBank)]
    return {id(stack): stack.ndim - 1 for bank in banks for _, _, stack in bank.stacks()}
