"""Sharded data parallel (FSDP2): each worker keeps a shard of the state; gradients are reduce-scattered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from experts.hosts.group import Group
from experts.moe.bank import ExpertBank
from experts.moe.gate import Gate
from orchestrator.tasks.task import Task
from orchestrator.train.device.recompute import block_lists
from orchestrator.train.device.short_weights import is_shortened
from orchestrator.train.group.world import World
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.strategies.base import Strategy


class FSDPStrategy(Strategy):
    """Gradients and optimizer state, or parameters too, in shards on the workers.

    Gradients are reduced and scattered in every micro-batch: whole ones are never kept."""

    lockstep = True

    def __init__(self, model: nn.Module, task: Task, world: World) -> None:
        super().__init__(model, task)
        self.world = world

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        return self.world.all_reduce(norm_of_gradients(gradients).square()).sqrt()


def shard_model(model: nn.Module, world: World, keep_parameters: bool, offload: bool) -> None:
    """Shard a model in place, block by block; its parameter names stay. Gradients are summed, not averaged.

    ``keep_parameters`` leaves gathered parameters in memory from the forward to the backward pass (ZeRO-2).
    """
    # FSDP2's modules take a second to import, so runs without sharding do not import them.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    mesh = DeviceMesh.from_group(world.torch_group("shard"), world.device.type)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    _shard_blocks(model, keep_parameters, mesh=mesh, offload_policy=policy)


def whole_on_hosts(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that stay whole where the dense part is sharded over expert hosts.

    Each host has its own experts. Gates are small, and births and merges change their rows."""
    modules = [module for module in model.modules() if isinstance(module, ExpertBank | Gate)]
    return {parameter for module in modules for parameter in module.parameters()}


def shard_over_hosts(
    model: nn.Module, group: Group, device: torch.device, keep_parameters: bool, whole: set[nn.Parameter]
) -> list[Any]:
    """Shard a model over a group, but for the parameters in ``whole``. Return the sharded modules.

    They gather through the group; the caller sets how they scatter."""
    from orchestrator.train.strategies.host_mesh import GatherOverHosts, HostMesh

    mesh = HostMesh(group, device)
    modules = _shard_blocks(model, keep_parameters, mesh=mesh, ignored_params=whole)
    for module in modules:
        module.set_custom_all_gather(GatherOverHosts(group))
    return modules


def _shard_blocks(model: nn.Module, keep_parameters: bool, **options: Any) -> list[Any]:
    """Shard the blocks of a model, and the rest of it. Return the sharded modules.

    ``options`` are those of ``fully_shard``; with gathered parameters kept, or freed after each block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    modules: list[Any] = [*chain.from_iterable(block_lists(model)), model]
    is_short = is_shortened(model)
    if is_short:
        # Gathered in fp32, so that gradients are reduced in fp32 too.
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    for module in modules:
        reshard = not keep_parameters and module is not model
        fully_shard(module, reshard_after_forward=reshard, **options)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if is_short:
            _keep_gradients_in_fp32(module)
    return modules


def _keep_gradients_in_fp32(module: Any) -> None:
    """Let FSDP2 keep reduced gradients as they are: it would round them to the type of the shards, in every
    micro-batch. It sets that type before its first pass."""
    for group in module._get_fsdp_state()._fsdp_param_groups:

        def set_types(group: Any = group, set_own_types: Callable[[], None] = group._init_mp_dtypes) -> None:
            set_own_types()
            group._orig_dtype = torch.float32

        group._init_mp_dtypes = set_types
