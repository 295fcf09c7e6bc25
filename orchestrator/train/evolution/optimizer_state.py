"""The form of the optimizer's state of a layer's experts, which all workers must know alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experts.routed import RoutedExperts
from experts.surgery.expert_transfer import Slot, StateSpec
from orchestrator.train.parts.world import World


def state_spec(layer: RoutedExperts, optimizer: torch.optim.Optimizer, world: World) -> StateSpec:
    """Return the optimizer state of a layer's experts. A host without any learns it from the others."""
    number_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups = {role: number_of.get(id(stack)) for _, role, stack in layer.bank.stacks()}
    frozen = {
        role: _name_of(stack.dtype) for _, role, stack in layer.bank.stacks() if not stack.requires_grad
    }
    own: dict[str, Any] | None = None
    if layer.bank.held:
        trained = [stack for _, _, stack in layer.bank.stacks() if stack.requires_grad]
        own = _described(trained, optimizer) | {"frozen": frozen, "groups": groups}
    described = [entry for entry in world.gather_values(own) if entry is not None]
    return _spec(max(described, key=lambda entry: len(entry["slots"]))) if described else StateSpec()


def _described(trained: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the form of trained stacks and of the optimizer's state of them, as plain values."""
    if not trained:
        return {"slots": [], "values": {}, "dtype": None}
    state: dict[str, Any] = optimizer.state.get(trained[0], {})
    slots = [
        [name, _name_of(value.dtype), value.ndim == 0, value.device.type == "cpu"]
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]
    values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return {"slots": slots, "values": values, "dtype": _name_of(trained[0].dtype)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(fields: dict[str, Any]) -> StateSpec:
    slots = [Slot(name, getattr(torch, dtype), *places) for name, dtype, *places in fields["slots"]]
    dtype = getattr(torch, fields["dtype"]) if fields["dtype"] else None
    frozen = {role: getattr(torch, name) for role, name in fields["frozen"].items()}
    return StateSpec(tuple(slots), dtype, fields["values"], frozen, fields["groups"])
