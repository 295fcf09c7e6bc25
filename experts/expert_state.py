"""State keyed by expert, independent of placement.

Stacked tensors are split into one entry per global expert id, and joined again for any bank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank, named_banks


def stacked_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the experts' entries, in stacked order, by the name of their stack.

    For expert 3, ``blocks.0.bank.up_64`` has the entry ``blocks.0.bank.3.up``."""
    return {
        f"{prefix}.{role}_{group.hidden}": [f"{prefix}.{bank.ids[row]}.{role}" for row in group.rows]
        for prefix, bank in named_banks(model)
        for group, role, _ in bank.stacks()
    }


def remote_expert_names(model: nn.Module) -> set[str]:
    """Return the names of the entries of experts on other hosts."""
    return _entries(model, lambda bank: set(range(len(bank.sizes))) - set(bank.held))


def copied_expert_names(model: nn.Module) -> set[str]:
    """Return the names of the entries that this host holds a copy of, and another host saves."""
    return _entries(model, lambda bank: set(bank.held) - set(bank.owned))


def _entries(model: nn.Module, rows_of: Callable[[ExpertBank], set[int]]) -> set[str]:
    return {
        f"{prefix}.{bank.ids[row]}.{role}"
        for prefix, bank in named_banks(model)
        for row in rows_of(bank)
        for role in bank.form.roles
    }


def held_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the ids of this host's experts, by the name of their bank."""
    return {name: tuple(bank.ids[row] for row in bank.held) for name, bank in named_banks(model)}


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
