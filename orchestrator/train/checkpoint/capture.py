"""Copies the state of a run to the main worker's host memory, as the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from experts.expert_state import is_expert_parallel, split_experts, stacked_names
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.redaction import mask_tree
from orchestrator.train.checkpoint.files import Contents
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.state import (
    OptimizerState,
    TrainState,
    model_tensors,
    optimizer_state,
    plain_state,
)
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.fsdp import full_tensor, is_sharded, reshard_all

Stacked = Mapping[str, list[str]]
"""The names of the experts in each stacked parameter."""
_Tensors = dict[str, dict[str, Tensor]]
"""Tensors by kind ("model", "optimizer") and name."""


def capture(state: TrainState, progress: Progress, world: World) -> Contents | None:
    """Return a copy of the state in host memory on the main worker, and None on the others.

    Where the model is sharded, or its experts live on several hosts, every worker must call it."""
    experts_on_hosts = is_expert_parallel(state.model)
    if not world.is_main and not is_sharded(state.model) and not experts_on_hosts:
        return None
    # An evaluation may have left parameters gathered. The shards are the state.
    reshard_all(state.model)
    stacked = stacked_names(state.model)
    optimizer = optimizer_state(state, stacked)
    tensors = _local_tensors(state, optimizer, stacked, world)
    if experts_on_hosts:
        _gather_experts(tensors, optimizer.values, stacked, world, progress.step)
    if not world.is_main:
        return None
    plain = plain_state(state, optimizer, progress)
    # Metrics alone have names that a user's code chose. Other names must stay, to be read again.
    plain["progress"]["validation"] = mask_tree(progress.validation, secret_values())
    return Contents(tensors, plain)


def _local_tensors(state: TrainState, optimizer: OptimizerState, stacked: Stacked, world: World) -> _Tensors:
    """Copy this worker's part of the state to host memory."""
    experts_on_hosts = is_expert_parallel(state.model)
    keep = world.is_main or experts_on_hosts

    def select(named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # The main host has the dense part itself: from the others only their experts are needed.
        if world.is_main or not experts_on_hosts:
            return named
        return {name: tensor for name, tensor in named.items() if name in stacked}

    model = _copy_to_host(select(model_tensors(state.model)), stacked, keep)
    slots: dict[str, Tensor] = {}
    for slot, named in optimizer.slots.items():
        for name, tensor in _copy_to_host(select(named), stacked, keep).items():
            slots[f"{slot}/{name}"] = tensor
    return {"model": model, "optimizer": slots}


def _copy_to_host(tensors: Mapping[str, Tensor], stacked: Stacked, keep: bool) -> dict[str, Tensor]:
    """Copy tensors to host memory, one entry per expert.

    Gathering a shard is a collective, so every worker takes part; only those that ``keep`` the
    result copy it. One tensor at a time: a sharded model is never whole on a device."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor.detach())
        if keep:
            for key, part in _split_by_expert(name, whole, stacked).items():
                copies[key] = part.to("cpu", copy=True).contiguous()
    return copies


def _split_by_expert(name: str, tensor: Tensor, stacked: Stacked) -> dict[str, Tensor]:
    """Split a stacked tensor by expert.

    A scalar (Adam's step counter) becomes each expert's own."""
    if name in stacked and tensor.ndim == 0:
        tensor = tensor.expand(len(stacked[name]))
    return split_experts({name: tensor}, stacked)


def _gather_experts(
    tensors: _Tensors,
    values: dict[str, Any],
    stacked: Stacked,
    world: World,
    step: int,
) -> None:
    """Add the experts of all hosts to the main host's tensors and values, in place."""
    expert_names = {name for names in stacked.values() for name in names}
    local_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors["model"].items():
        if name in expert_names:
            local_tensors[f"model/{name}"] = tensor
    for key, tensor in tensors["optimizer"].items():
        if _name_of(key) in expert_names:
            local_tensors[f"optimizer/{key}"] = tensor
    local_values = {key: value for key, value in values.items() if _name_of(key) in expert_names}
    hosts = world.gather_to_main(local_tensors, local_values, f"experts/{step}")
    for host_tensors, host_values in hosts:
        for key, tensor in host_tensors.items():
            kind, _, name = key.partition("/")
            tensors[kind][name] = tensor
        values |= host_values


def _name_of(key: str) -> str:
    """Return the name in the key ``slot/name``."""
    return key.partition("/")[2]
