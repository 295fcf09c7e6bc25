"""Shards of tensors and models, recognised by their methods: FSDP2's classes take a second to import."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a worker's shard of a larger one (a ``DTensor``)."""
    return is_shard_type(type(tensor))


def is_shard_type(kind: type) -> bool:
    return hasattr(kind, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a tensor as an ordinary one; the memory is shared."""
    sharded: Any = tensor
    return sharded.to_local() if is_shard(tensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded a module."""
    return hasattr(model, "reshard")


def reshard_all(model: nn.Module) -> None:
    """Free gathered parameters.

    A forward pass without a backward pass (an evaluation) leaves some. The next pass would use them, also
    where the shards have changed since."""
    for module in model.modules():
        if is_sharded(module):
            sharded: Any = module
            sharded.reshard()
