"""The hosts as a group that can talk: the only place of this library that knows torch.distributed. It speaks to the process
group itself, not to torch's global one, so that several groups, and groups of several lives, stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
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

    def send(self, tensor: Tensor, to: int) -> None:
        self.handle.send([tensor], to, 0).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        self.handle.recv([tensor], source, 0).wait()


def whole_rows(tensor: Tensor) -> Tensor:
    """A tensor as rows of bytes, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)
