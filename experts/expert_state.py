"""State keyed by expert, not by where it lives: stacked tensors are cut into one entry per global expert id and joined
again, whatever bank they come from or go to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.bank import ExpertBank


def stacked_names(model: nn.Module) -> dict[str, list[str]]:
    """Each stacked parameter's name with the names of its experts' pieces: ``blocks.0.bank.up_64`` becomes
    ``blocks.0.bank.3.up`` for expert 3, and so on, in stacked order."""
    names: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            for group, role, _ in module.stacks():
                names[f"{prefix}.{role}_{group.hidden}"] = [
                    f"{prefix}.{expert}.{role}" for expert in group.ids
                ]
    return names


def names_elsewhere(model: nn.Module) -> set[str]:
    """The names of pieces of experts that live on other hosts."""
    return {
        f"{prefix}.{expert}.{role}"
        for prefix, bank in model.named_modules()
        if isinstance(bank, ExpertBank)
        for expert in range(len(bank.sizes))
        if expert not in bank.held
        for role in ("up", "down")
    }


def lives_on_hosts(model: nn.Module) -> bool:
    """Whether the model's experts are shared out among several hosts."""
    return any(layer.context.exchange.size > 1 for _, layer in moe_layers(model))


def split_experts(state: Mapping[str, Tensor], stacked: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """State by parameter name to state by expert. What is not stacked is passed on."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in stacked:
            result |= dict(zip(stacked[name], tensor.unbind(), strict=True))
        else:
            result[name] = tensor
    return result


def join_experts(state: Mapping[str, Tensor], stacked: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """The inverse of ``split_experts``, for the model at hand. Raises KeyError with the name of a missing piece."""
    pieces = {piece for names in stacked.values() for piece in names}
    result = {name: tensor for name, tensor in state.items() if name not in pieces}
    for name, names in stacked.items():
        result[name] = torch.stack([state[piece] for piece in names])
    return result
