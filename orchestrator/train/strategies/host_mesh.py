"""FSDP2 over a group of hosts that can be left.

Torch's own collectives need a process group that lasts as long as the process, and no host could leave it.
Here FSDP2 gets a mesh without one, and gathers and scatters through our group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from experts.hosts.group import Group


@dataclass(frozen=True)
class _Ranks:
    """The part of a process group that FSDP2 asks for."""

    group: Group

    def rank(self) -> int:
        return self.group.rank

    def size(self) -> int:
        return self.group.size


class HostMesh(DeviceMesh):
    """A mesh of one dimension, whose collectives run over our group."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(device.type, torch.arange(group.size), _init_backend=False, _rank=group.rank)
        self.host_group = group

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        del mesh_dim
        return _Ranks(self.host_group)


class _OwnMemory:
    """Buffers of collectives in ordinary memory."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherOverHosts(_OwnMemory, AllGather):
    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        del group, async_op
        self._group.all_gather(output_tensor, input_tensor).wait()


class ScatterOverHosts(_OwnMemory, ReduceScatter):
    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        del group, async_op
        assert op == ReduceOp.SUM, f"gradients are summed over the hosts, not reduced by {op}"
        self._group.reduce_scatter(output_tensor, input_tensor).wait()
