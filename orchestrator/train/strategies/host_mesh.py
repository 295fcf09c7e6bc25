"""FSDP2 over a group of hosts that can be left.

Torch's own collectives need a process group that lasts as long as the process, and no host could leave it.
Here FSDP2 gets a mesh without one, and gathers and scatters through our group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A mesh of one dimension, whose collectives run over our group.

    It equals no other mesh. Torch caches what operations on shards return, with the mesh: to torch, meshes of
    one size are equal, so that shards of a later group would get the group and the rank of an earlier one."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(device.type, torch.arange(group.size), _init_backend=False, _rank=group.rank)
        self.host_group = group

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

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


class ScatterExactly(ScatterOverHosts):
    """Rounds the gradients of a micro-batch to integers, and leaves each host its shard of their sum:
    the order of the hosts does not show in it.

    FSDP2 gets the gradients in floating point too, from which it makes those of its parameters, and calls the
    hooks of these at once: ``received`` finds the integers of such a gradient."""

    def __init__(self, group: Group, to_multiples: Callable[[Tensor], Tensor]) -> None:
        super().__init__(group)
        self._to_multiples = to_multiples
        self._output: Tensor | None = None
        self._multiples: Tensor | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        del group, async_op
        assert op == ReduceOp.SUM, f"gradients are summed over the hosts, not reduced by {op}"
        received = torch.empty_like(output_tensor, dtype=torch.int64)
        self._group.reduce_scatter(received, self._to_multiples(input_tensor)).wait()
        # Nobody reads these values: they are there for the shapes of FSDP2's gradients.
        output_tensor.zero_()
        self._output = output_tensor
        self._multiples = received

    def received(self, gradient: Tensor) -> Tensor:
        """Return the integers of a gradient, which FSDP2 has made as a view of the last output."""
        assert self._output is not None, "a gradient before the first reduce-scatter"
        assert self._multiples is not None
        if not gradient.numel():
            return torch.zeros_like(gradient, dtype=torch.int64)
        same_memory = gradient.untyped_storage().data_ptr() == self._output.untyped_storage().data_ptr()
        assert same_memory, "FSDP2 has copied the result of a reduce-scatter"
        begin = gradient.storage_offset() - self._output.storage_offset()
        return self._multiples[begin : begin + gradient.numel()].view(gradient.shape)

    def forget(self) -> None:
        """Free the memory of the last result."""
        self._output = None
        self._multiples = None
