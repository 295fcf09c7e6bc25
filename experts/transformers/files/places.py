"""The tensors of a model under the names of ``transformers``, and their memory on this host.

See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.moe.bank import ExpertBank
from experts.transformers.hosted import HostedExperts
from experts.transformers.layout import in_our_layout, is_experts_module, parameter_names


@dataclass(frozen=True)
class Place:
    """A tensor that all hosts hold."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class ExpertsPlace:
    """A stack of experts in the layout of ``transformers``, of which this host holds some."""

    name: str
    shape: tuple[int, ...]
    """The shape with all experts."""
    held: Mapping[int, Tensor]
    """A view of each held expert, with a leading dimension of one."""


Places = Mapping[str, Place | ExpertsPlace]


def places_of(model: nn.Module) -> Places:
    """Return the places of all parameters and persistent buffers, by their names in ``transformers``.

    Tied tensors have a place under each of their names."""
    places: dict[str, Place | ExpertsPlace] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, HostedExperts | ExpertBank):
            continue
        if is_hosted(module):
            for place in experts_places(prefix, module):
                places[place.name] = place
        for name, tensor in own_tensors(module).items():
            if name not in module._non_persistent_buffers_set:
                full_name = f"{prefix}.{name}" if prefix else name
                places[full_name] = Place(full_name, tensor.detach())
    return places


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def is_hosted(module: nn.Module) -> bool:
    """Whether a module of experts has its weights in a bank of ours."""
    return is_experts_module(module) and hasattr(module, "hosted")


def experts_places(prefix: str, experts: Any) -> list[ExpertsPlace]:
    """Return the places of a module of experts. ``prefix`` is its name."""
    bank: ExpertBank = experts.hosted.bank
    names = parameter_names(experts)
    num_experts = len(bank.sizes)
    if not bank.held:
        # This host has no expert of the layer, and no stack that tells the shapes.
        return [ExpertsPlace(f"{prefix}.{name}", (num_experts,), {}) for name in names.values()]
    places = []
    for group, role, stack in bank.stacks():
        theirs = in_our_layout(experts, stack.detach())
        held = {row: theirs[slot : slot + 1] for slot, row in enumerate(group.rows)}
        shape = (num_experts, *theirs.shape[1:])
        places.append(ExpertsPlace(f"{prefix}.{names[role]}", shape, held))
    return places


def check_memory(model: nn.Module) -> None:
    """Refuse a model with tensors on the meta device."""
    without = [name for name, tensor in model.named_parameters() if tensor.device == torch.device("meta")]
    if without:
        raise ValueError(
            f"{without[0]} and {len(without) - 1} other parameters have no memory to read into; "
            "call model.to_empty(device=...) first"
        )
