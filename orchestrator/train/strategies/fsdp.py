"""Sharded data parallel (FSDP2): each worker keeps a shard of the state; gradients are reduce-scattered."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experts.hosts.group import Group
from experts.moe.bank import ExpertBank
from orchestrator.tasks.task import Task
from orchestrator.train.device.recompute import block_lists
from orchestrator.train.group.world import World
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.optim.shards import is_shard, local_part
from orchestrator.train.strategies.base import Strategy


class FSDPStrategy(Strategy):
    """Gradients and optimizer state, or parameters too, in shards on the workers.

    Gradients are reduced and scattered in every micro-batch: whole ones are never kept."""

    lockstep = True

    def __init__(self, model: nn.Module, task: Task, world: World) -> None:
        super().__init__(model, task)
        self.world = world

    def local_parts(self, gradients: list[Tensor]) -> list[Tensor]:
        return [local_part(gradient) for gradient in gradients]

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


def shard_dense_part(model: nn.Module, group: Group, device: torch.device, keep_parameters: bool) -> None:
    """Shard the dense part of a model over expert hosts, block by block; the experts stay whole.

    ``keep_parameters`` as in ``shard_model``. A module whose parameters are all of experts has no shards."""
    from orchestrator.train.strategies.host_mesh import GatherOverHosts, HostMesh, ScatterOverHosts

    banks = [module for module in model.modules() if isinstance(module, ExpertBank)]
    experts = {parameter for bank in banks for parameter in bank.parameters()}
    mesh = HostMesh(group, device)
    for sharded in _shard_blocks(model, keep_parameters, mesh=mesh, ignored_params=experts):
        sharded.set_custom_all_gather(GatherOverHosts(group))
        sharded.set_custom_reduce_scatter(ScatterOverHosts(group))


def _shard_blocks(model: nn.Module, keep_parameters: bool, **options: Any) -> list[Any]:
    """Shard the blocks of a model, and the rest of it. Return the sharded modules.

    ``options`` are those of ``fully_shard``; with gathered parameters kept, or freed after each block."""
    from torch.distributed.fsdp import fully_shard

    modules: list[Any] = [*chain.from_iterable(block_lists(model)), model]
    for module in modules:
        reshard = not keep_parameters and module is not model
        fully_shard(module, reshard_after_forward=reshard, **options)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return modules


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with all its shards. Every worker must call if it is sharded.

    ``DTensor.full_tensor`` crashes over gloo with shards on a GPU.
    """
    if not is_shard(tensor):
        return tensor
    sharded: Any = tensor
    local = sharded.to_local()
    size = sharded.device_mesh.size()
    if not sharded.placements[0].is_shard(0):
        return local
    rows = -(-tensor.shape[0] // size)  # of every shard but the last ones, which may be shorter
    padded = local.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(local)] = local
    gathered = padded.new_empty((size * rows, *tensor.shape[1:]))
    host_group: Group | None = getattr(sharded.device_mesh, "host_group", None)
    if host_group is not None:
        host_group.all_gather(gathered, padded).wait()
    else:
        dist.all_gather(list(gathered.split(rows)), padded, group=sharded.device_mesh.get_group())
    return gathered[: tensor.shape[0]]


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a full tensor into one that may be sharded."""
    local_part(target).copy_(local_part(shard_like(source, target)))


def shard_like(source: Tensor, parameter: Tensor) -> Tensor:
    """Return a full tensor sharded as a parameter is, on the parameter's device."""
    if not is_shard(parameter) or source.shape != parameter.shape:
        return source
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    mesh = sharded.device_mesh
    placements = sharded.placements
    shard = source
    if placements[0].is_shard(0):
        # Every worker has the full tensor, and takes its rows.
        rows = -(-source.shape[0] // mesh.size())
        (rank,) = mesh.get_coordinate()
        begin = rank * rows
        shard = source[begin : begin + rows]
    local = shard.to(sharded.to_local().device, copy=True)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
