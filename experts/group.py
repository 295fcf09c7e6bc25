"""The hosts as a group that can talk: the only place of this library that knows torch.distributed. It speaks to the process
group itself, not to torch's global one, so that several groups, and groups of several lives, stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllreduceOptions, AllToAllOptions


class Work(Protocol):
    """Something under way. ``wait`` raises what went wrong."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class Group:
    """A host's place among the hosts."""

    rank: int
    size: int
    handle: ProcessGroup

    def all_to_all(self, received: Tensor, sent: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Work:
        """Rows to each host and from each, as many as the lists say. Both tensors are contiguous and live until it is done."""
        return self.handle.alltoall_base(received, sent, list(receives), list(sends), AllToAllOptions())  # pyright: ignore

    def add_up(self, tensor: Tensor) -> Work:
        """The sum over all hosts, in place."""
        return self.handle.allreduce([tensor], AllreduceOptions())
