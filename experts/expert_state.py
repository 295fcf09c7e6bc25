"""State keyed by expert, independent of placement.

Stacked tensors are split into one entry per global expert id, and joined again for any bank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank


def stacked_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the experts' entries, in stacked order, by the name of their stack.

    For expert 3, ``blocks.0.bank.up_64`` has the entry ``blocks.0.bank.3.up``."""
    names: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            for group, role, _ in module.stacks():
                entries = [f"{prefix}.{module.ids[row]}.{role}" for row in group.rows]
                names[f"{prefix}.{role}_{group.hidden}"] = entries
    return names


def remote_expert_names(model: nn.Module) -> set[str]:
    """Return the names of the entries of experts on other hosts."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            remote = set(range(len(module.sizes))) - set(module.held)
            names |= {f"{prefix}.{module.ids[row]}.{role}" for row in remote for role in module.form.roles}
    return names


def copied_expert_names(model: nn.Module) -> set[str]:
    """Return the names of the entries that this host holds a copy of, and another host saves."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            copied = set(module.held) - set(module.owned)
            names |= {f"{prefix}.{module.ids[row]}.{role}" for row in copied for role in module.form.roles}
    return names


def held_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the ids of this host's experts, by the name of their bank."""
    banks = {name: module for name, module in model.named_modules() if isinstance(module, ExpertBank)}
    return {name: tuple(bank.ids[row] for row in bank.held) for name, bank in banks.items()}


def is_expert_parallel(model: nn.Module) -> bool:
    """Whether the model's experts are distributed over several hosts."""
    return any(layer.context.exchange.size > 1 for _, layer in moe_layers(model))


def split_experts(
    state: Mapping[str, Tensor],
    stacked: Mapping[str, list[str]],
) -> dict[str, Tensor]:
    """Split stacked tensors into an entry per expert. Other tensors are passed on."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in stacked:
            # unbind makes views: no memory is copied.
            result |= dict(zip(stacked[name], tensor.unbind(), strict=True))
        else:
            result[name] = tensor
    return result


def join_experts(
    state: Mapping[str, Tensor],
    stacked: Mapping[str, list[str]],
) -> dict[str, Tensor]:
    """Stack the entries of experts again. Raises KeyError with the name of a missing entry."""
    all_entries = {entry for entries in stacked.values() for entry in entries}
    result = {name: tensor for name, tensor in state.items() if name not in all_entries}
    for name, entries in stacked.items():
        result[name] = torch.stack([state[entry] for entry in entries])
    return result
