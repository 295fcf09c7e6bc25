"""The form of the optimizer's state of a layer's experts, which all workers must know alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experts.moe.routed import RoutedExperts
from experts.surgery.expert_transfer import Slot, StateSpec
from orchestrator.errors import UserError
from orchestrator.train.group.world import World


def state_spec(layer: RoutedExperts, optimizer: torch.optim.Optimizer, world: World) -> StateSpec:
    """Return the optimizer state of a layer's experts. A host without any learns it from the others.

    Raises UserError on all hosts if the optimizer of some has other parameter groups."""
    number_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups = {role: number_of.get(id(stack)) for _, role, stack in layer.bank.stacks()}
    frozen = {
        role: _name_of(stack.dtype) for _, role, stack in layer.bank.stacks() if not stack.requires_grad
    }
    own: dict[str, Any] | None = None
    if layer.bank.held:
        trained = {role: stack for _, role, stack in layer.bank.stacks() if stack.requires_grad}
        own = _described(trained, optimizer) | {"frozen": frozen, "groups": groups}
    gathered = world.gather_values([own, len(optimizer.param_groups)])
    _check_groups([num_groups for _, num_groups in gathered])
    described = [entry for entry, _ in gathered if entry is not None]
    return _spec(max(described, key=lambda entry: len(entry["slots"]))) if described else StateSpec()


def _check_groups(numbers: Sequence[int]) -> None:
    if len(set(numbers)) > 1:
        raise UserError(
            f"the optimizer has {' and '.join(map(str, sorted(set(numbers))))} parameter groups on different "
            "hosts, so that experts cannot change hosts; let build_optimizer return the same groups whatever "
            "parameters it gets, some of them empty, or use --evolution off --rebalance off"
        )


def _described(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the form of trained stacks, one for each role, and of the optimizer's state, as plain values."""
    if not trained:
        return {"slots": [], "values": {}, "dtype": None}
    roles_of: dict[tuple[str, str, bool, bool], list[str]] = {}
    values: dict[str, Any] = {}
    for role, stack in trained.items():
        for name, value in optimizer.state.get(stack, {}).items():
            if isinstance(value, Tensor):
                slot = (name, _name_of(value.dtype), value.ndim == 0, value.device.type == "cpu")
                roles_of.setdefault(slot, []).append(role)
            else:
                values[name] = value
    slots = [[*slot, roles] for slot, roles in roles_of.items()]
    dtype = next(iter(trained.values())).dtype
    return {"slots": slots, "values": values, "dtype": _name_of(dtype)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(fields: dict[str, Any]) -> StateSpec:
    slots = [
        Slot(name, getattr(torch, dtype), is_scalar, on_host, tuple(roles))
        for name, dtype, is_scalar, on_host, roles in fields["slots"]
    ]
    dtype = getattr(torch, fields["dtype"]) if fields["dtype"] else None
    frozen = {role: getattr(torch, name) for role, name in fields["frozen"].items()}
    return StateSpec(tuple(slots), dtype, fields["values"], frozen, fields["groups"])
