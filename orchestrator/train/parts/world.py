"""Who this process is among those that train together, and what they say to each other. Passed by hand; there is no
global one. One process is the same code without the talking."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from experts.group import Group, GroupFactory
from experts.membership import GroupLeft, GroupMembership

_PIECE_BYTES = 2**26  # that a host sends the main one at once


@dataclass(frozen=True)
class World:
    """Rank, size and device of one worker, the group it belongs to, and the share of each batch that each worker takes."""

    rank: int
    size: int
    device: torch.device
    group: Group | None = None
    store: Store | None = None
    shares: tuple[float, ...] = ()
    timeout: timedelta | None = None
    group_factory: GroupFactory | None = None
    """Where the group can be left: what forms it, and more like it."""
    cpu_group: Group | None = None
    """For what lies in host memory, where the group itself carries only what lies on devices."""
    published_keys: list[str] = field(default_factory=list, compare=False)
    """Keys in the store that this worker has set for all to read."""

    @classmethod
    def single_process(cls, device: str | torch.device = "cpu") -> World:
        return cls(0, 1, torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def with_shares(self, shares: Sequence[float]) -> World:
        """The same workers with other shares of the batch."""
        if len(shares) != self.size or min(shares) <= 0:
            raise ValueError(
                f"{len(shares)} shares {list(shares)} for {self.size} workers; each needs one above 0"
            )
        return replace(self, shares=tuple(shares))

    def with_data_on_main(self) -> World:
        """The same workers, of which the first takes all samples."""
        return replace(self, shares=(1.0, *(0.0 for _ in range(self.size - 1))))

    @property
    def data_ranks(self) -> int:
        """Workers that have a share of the batch."""
        return sum(share > 0 for share in self.shares) if self.shares else self.size

    def split_batch(self, count: int) -> list[slice]:
        """How ``count`` samples fall to the workers: in order, evenly or by their shares, none left out."""
        if not self.shares:
            bounds = [count * rank // self.size for rank in range(self.size + 1)]
        else:
            whole = sum(self.shares)
            bounds = [
                *(int(count * sum(self.shares[:rank]) / whole + 0.5) for rank in range(self.size)),
                count,
            ]
        return [slice(begin, end) for begin, end in pairwise(bounds)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place."""
        if self.size > 1:
            self._group_for(tensor).all_reduce(tensor).wait()
        return tensor

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all workers. Waits for all of them."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64)
        self._group_for(tensor).all_reduce_max(tensor).wait()
        return tensor.tolist()

    def _group_for(self, tensor: Tensor) -> Group:
        assert self.group is not None, "one process has no group"
        return self.cpu_group if self.cpu_group is not None and tensor.device.type == "cpu" else self.group

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each worker, by rank."""
        mine = torch.zeros(self.size, len(values), dtype=torch.float64)
        mine[self.rank] = torch.tensor(list(values), dtype=torch.float64)
        return self.all_reduce(mine).tolist()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """The main worker's tensors, to all, in place. Others than dense ones by way of copies: gloo writes past the end of an
        expanded tensor."""
        if self.size > 1:
            dense = [
                t.detach() if t.is_contiguous() else t.detach().clone(memory_format=torch.contiguous_format)
                for t in tensors
            ]
            for work in [self._group_for(tensor).broadcast(tensor) for tensor in dense]:
                work.wait()
            for tensor, sent in zip(tensors, dense, strict=True):
                if not tensor.is_contiguous() and not torch.equal(tensor, sent):
                    tensor.detach().copy_(sent)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's own group, for what torch itself spreads over the workers."""
        assert self.group is not None
        assert isinstance(self.group.handle, dist.ProcessGroup)
        return self.group.handle

    def new_group(self) -> Group:
        """A second group of the same workers, whose messages do not wait for those of the first. All must ask."""
        assert self.group is not None, "one process has no group"
        if self.group_factory is not None:
            return self.group_factory.form("nccl" if self.cpu_group is not None else "gloo")
        handle = dist.new_group(timeout=self.timeout)
        assert isinstance(handle, dist.ProcessGroup)
        _KEPT.append((handle, self.store))
        return Group(self.rank, self.size, handle)

    @property
    def membership(self) -> GroupMembership:
        """The membership in the group at hand; one that nobody ends where it cannot be left."""
        return self.group_factory.membership if self.group_factory is not None else GroupMembership()

    def barrier(self) -> None:
        if self.size > 1:
            self.all_reduce_max([0.0])

    def gather_to_main(
        self, named: Mapping[str, Tensor], beside: Any, name: str
    ) -> list[tuple[dict[str, Tensor], Any]]:
        """Tensors in host memory and a plain value from each of the others to the main worker, who gets them by rank; nobody
        else gets any. One sends at a time, a piece at a time. ``name`` is used once in the life of the group."""
        kinds = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in named.items()
        ]
        found: list[tuple[dict[str, Tensor], Any]] = []
        for rank in range(1, self.size):
            mine = self.rank == rank
            sizes, theirs, plain = self.broadcast_value(
                f"{name}/{rank}", [_sizes(named.values()), kinds, beside] if mine else None
            )
            tensors = dict(named) if mine else {}
            if self.is_main:
                tensors = {
                    name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in theirs
                }
            flat = [_bytes_of(tensor.contiguous()) for tensor in tensors.values() if tensor.numel()]
            for number, size in enumerate(sizes):
                self._to_first(flat[number] if flat else torch.empty(0, dtype=torch.uint8), rank, size)
            if self.is_main:
                found.append((tensors, plain))
        return found

    def _to_first(self, data: Tensor, sender: int, size: int) -> None:
        """So many bytes of one worker into the main one's ``data``. The others come along, for all take part."""
        empty = torch.empty(0, dtype=torch.uint8)
        for begin in range(0, size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, size - begin)
            piece = data[begin : begin + count] if self.rank in (0, sender) else empty
            receives = [count if self.is_main and rank == sender else 0 for rank in range(self.size)]
            sends = [count if self.rank == sender and rank == 0 else 0 for rank in range(self.size)]
            sent, received = (piece, empty) if self.rank == sender else (empty, piece)
            self._group_for(empty).all_to_all(received, sent, receives, sends).wait()

    def wait_for_main(self, name: str) -> None:
        """Wait for the main worker, however long it takes: what it does for all may outlast the patience of a collective. If
        it is gone, so is the store, or the group is left. ``name`` is used once in the life of the group."""
        if self.size == 1:
            return
        store, key = self._store, f"meet/{name}"
        if self.is_main:
            store.set(key, "1")
        else:
            self.membership.until(lambda: store.check([key]))

    def broadcast_value(self, name: str, value: Any) -> Any:
        """A plain value that some workers know and the others don't (None): that of the lowest rank that does. ``name`` is
        used once in the life of the group."""
        if self.size == 1:
            return value
        knows = -self.all_reduce_max([-float(self.rank if value is not None else self.size)])[0]
        if knows == self.size:
            return None
        store, key = self._store, f"agree/{name}"
        while self.published_keys:  # all have come this far: what was agreed on before has been read
            store.delete_key(self.published_keys.pop())
        if knows == self.rank:
            store.set(key, json.dumps(value))
            self.published_keys.append(key)
        self.membership.until(lambda: store.check([key]))
        return json.loads(store.get(key))

    @property
    def _store(self) -> Store:
        assert self.store is not None, "one process has no store"
        return self.store


def _sizes(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.numel() * tensor.itemsize for tensor in tensors if tensor.numel()]


def _bytes_of(tensor: Tensor) -> Tensor:
    """A dense tensor as bytes, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


_KEPT: list[Any] = []
"""Groups that were left, for as long as the process lives: gloo's destructor waits for its threads with the interpreter
locked, and one of them may be waiting for the interpreter (seen as a hang at the end of one run in ten)."""


@contextmanager
def process_group_world(
    store: Store, rank: int, size: int, device: torch.device, backend: str, timeout_s: float
) -> Iterator[World]:
    """The world of workers that meet at a store. With NCCL, what lies in host memory travels by gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(
        both, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    world = World(
        rank, size, device, Group(rank, size, dist.group.WORLD), store, timeout=timedelta(seconds=timeout_s)
    )
    _KEPT.append((dist.group.WORLD, store))
    try:
        yield world
        world.barrier()  # the store ends with the main worker, and the others may still ask it
    finally:
        dist.destroy_process_group()


@contextmanager
def recoverable_world(lines: GroupFactory, device: torch.device, backend: str) -> Iterator[World]:
    """The world of hosts that meet at a store of someone else's, for one life of their group."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        group = lines.form(backend)
        beside = lines.form("gloo") if backend == "nccl" else None
        store = PrefixStore(f"{lines.name}/world", lines.store)
        yield World(lines.rank, lines.size, device, group, store, group_factory=lines, cpu_group=beside)
    finally:
        lines.close()


_SIGNS = (
    "gloo/",
    "gloo timed out",
    "nccl",
    "connection reset by peer",
    "connection closed by peer",
    "broken pipe",
    "process group",
)


_OURS = tuple(str(Path(__file__).resolve().parents[3] / package) for package in ("orchestrator", "experts"))


def is_communication_error(error: BaseException) -> bool:
    """Whether an error is another worker's silence rather than this one's fault. What a user's own code raises is theirs,
    whatever it says; one that came from another process is judged by its words."""
    if isinstance(error, dist.DistError | GroupLeft):
        return True
    if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in _SIGNS):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or "site-packages" in frames[-1].filename or frames[-1].filename.startswith(_OURS)


def tcp_store(address: str, port: int, size: int, is_main: bool, timeout_s: float) -> Store:
    """The meeting place of workers on any nodes; the main worker keeps it."""
    return TCPStore(address, port, size, is_main, timedelta(seconds=timeout_s), wait_for_workers=False)


def open_store(address: str) -> tuple[Store, tuple[str, int]]:
    """A meeting place for others, kept by this process, and where it is."""
    store = TCPStore(address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    return store, (address, store.port)


def file_store(path: str, size: int) -> Store:
    """The meeting place of workers on one machine, without a port."""
    return FileStore(path, size)


_COLLECTIVE_PROBE = """
import sys, datetime, torch, torch.distributed as dist
rank, size, backend, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=30))
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
x = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all(), x[0].item()
dist.destroy_process_group()
"""


def probe_collective(backend: str, size: int = 2, timeout_s: float = 90.0) -> str | None:
    """Sum a tensor over ``size`` fresh processes. None when the sum was right, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _COLLECTIVE_PROBE, str(rank), str(size), backend, f"{folder}/store"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=timeout_s)
                if process.returncode:
                    lines = [line for line in errors.strip().splitlines() if line.strip()]
                    return f"rank {rank} ended with code {process.returncode}: {lines[-1] if lines else 'no message'}"
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:g} s"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return None
