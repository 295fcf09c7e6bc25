"""Shards of tensors and models, recognised by their methods: FSDP2's classes take a second to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experts.hosts.group import Group
from orchestrator.checkpoint.shard_rows import ShardRows, shard_rows


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a worker's shard of a larger one (a ``DTensor``)."""
    return is_shard_type(type(tensor))


def is_shard_type(kind: type) -> bool:
    return hasattr(kind, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a tensor as an ordinary one; the memory is shared."""
    sharded: Any = tensor
    return sharded.to_local() if is_shard(tensor) else tensor


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
    rows = rows_of_shard(tensor)
    padded = local.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(local)] = local
    gathered = padded.new_empty((size * rows, *tensor.shape[1:]))
    host_group: Group | None = getattr(sharded.device_mesh, "host_group", None)
    if host_group is not None:
        host_group.all_gather(gathered, padded).wait()
    else:
        dist.all_gather(list(gathered.split(rows)), padded, group=sharded.device_mesh.get_group())
    return gathered[: tensor.shape[0]]


def rows_of_shard(tensor: Tensor) -> int:
    """Return the rows of a tensor that each worker has. The last workers may have fewer."""
    sharded: Any = tensor
    return -(-tensor.shape[0] // sharded.device_mesh.size())


def as_shard(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a worker's rows of a tensor that is sharded as a parameter is; the memory is shared.

    Its rows may be shorter than those of the parameter."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    sharded: Any = parameter
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(sharded.device_mesh, sharded.placements, tensor_meta=meta)
    # Not from_local: it would move an offloaded shard to the devices of the mesh.
    return DTensor(local, spec, requires_grad=False)


def own_rows(tensor: Tensor) -> ShardRows | None:
    """Return the rows of a tensor that this worker has; None if it has the whole tensor."""
    sharded: Any = tensor
    if not is_shard(tensor) or not sharded.placements[0].is_shard(0):
        return None
    (rank,) = sharded.device_mesh.get_coordinate()
    return shard_rows(tensor.shape[0], rank, sharded.device_mesh.size())


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a full tensor, or this worker's rows, into a tensor that may be sharded."""
    local_part(target).copy_(local_part(shard_like(source, target)))


def shard_like(source: Tensor, parameter: Tensor) -> Tensor:
    """Return a full tensor sharded as a parameter is, on the parameter's device; any other as it is.

    Its rows may be shorter than those of the parameter."""
    if not is_shard(parameter) or source.shape[:1] != parameter.shape[:1]:
        return source
    # Every worker has the full tensor, and takes its rows.
    rows = own_rows(parameter)
    shard = source if rows is None else source[rows.first : rows.end]
    return as_shard(shard.to(local_part(parameter).device, copy=True), parameter)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded a module."""
    return hasattr(model, "reshard")


@contextmanager
def gathering(model: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let FSDP2 gather other values, of any type, in place of some shards, for passes without gradients."""
    replaced: list[tuple[Any, Tensor]] = []
    try:
        for shard in _shards_of_fsdp(model) if values else ():
            if shard.sharded_param in values:
                replaced.append((shard, shard._sharded_param_data))
                shard._sharded_param_data = _padded(values[shard.sharded_param], shard._sharded_param_data)
        yield
    finally:
        for shard, own in replaced:
            shard._sharded_param_data = own


def _shards_of_fsdp(model: nn.Module) -> Iterator[Any]:
    root: Any = model
    root._get_fsdp_state()._lazy_init()  # a first pass would take over the weights themselves again
    for module in model.modules():
        if is_sharded(module):
            sharded: Any = module
            for group in sharded._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def _padded(values: Tensor, own: Tensor) -> Tensor:
    """Return this worker's values, flat, and zeros up to the size of its own."""
    local = local_part(values)
    if local.numel() == own.numel():
        return local.reshape(-1)
    padded = local.new_zeros(own.numel())
    padded[: local.numel()] = local.reshape(-1)
    return padded


def reshard_all(model: nn.Module) -> None:
    """Free gathered parameters.

    A forward pass without a backward pass (an evaluation) leaves some. The next pass would use them, also
    where the shards have changed since."""
    for module in model.modules():
        if is_sharded(module):
            sharded: Any = module
            sharded.reshard()
