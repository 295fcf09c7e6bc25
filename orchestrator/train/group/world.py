"""One worker's view of the workers that train together: rank, device, mesh of groups, and their collectives.

A ``World`` is passed by hand; there is no global one. One process runs the same code without communication.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from experts.hosts.group import Group, GroupFactory
from experts.hosts.membership import GroupMembership
from orchestrator.train.group.stores import find_value, put_value

Axis = Literal["data", "expert", "shard"]
"""An axis of the mesh of workers: gradients are summed along ``data``, tokens travel along ``expert``, and
``shard`` has the parts of a parameter. Each spans all workers."""


@dataclass(frozen=True)
class World:
    """Rank, size and device of one worker, its groups, and each worker's share of a batch."""

    rank: int
    size: int
    device: torch.device
    group: Group | None = None
    store: Store | None = None
    shares: tuple[float, ...] = ()
    whole_micro_batches: bool = False
    """Whether each micro-batch goes to one worker, all of them in turn, so that its size is the same for any
    number of workers."""
    timeout: timedelta | None = None
    group_factory: GroupFactory | None = None
    """Forms the groups of one generation, which can be left; None where the group lasts to the end."""
    cpu_group: Group | None = None
    """The group for tensors in host memory, where ``group`` carries only tensors on devices."""
    secret: str = field(default="", repr=False)
    """The secret of the run, by which the workers know each other's values in the store."""
    _mesh: dict[Axis, Group] = field(default_factory=dict, repr=False, compare=False)
    """The groups along the axes that were asked for. Copies of this world share them."""

    @classmethod
    def single_process(cls, device: str | torch.device = "cpu") -> World:
        return cls(0, 1, torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def with_shares(self, shares: Sequence[float]) -> World:
        """Return the same workers with other shares of the batch."""
        if len(shares) != self.size or min(shares) <= 0:
            raise ValueError(
                f"{len(shares)} shares {list(shares)} for {self.size} workers; each needs one above 0"
            )
        return replace(self, shares=tuple(shares))

    def with_data_on_main(self) -> World:
        """Return the same workers, with all samples on the main one."""
        return replace(self, shares=(1.0, *(0.0 for _ in range(self.size - 1))))

    @property
    def data_ranks(self) -> int:
        """Number of workers with a share of the batch."""
        return sum(share > 0 for share in self.shares) if self.shares else self.size

    def split_batch(self, count: int, micro_batch: int) -> list[slice]:
        """Split ``count`` samples over the workers, in order: evenly or by their shares, each sample once.

        Of whole micro-batches the last one may be shorter, and the last workers may have none."""
        if self.whole_micro_batches:
            bounds = [min(micro_batch * rank, count) for rank in range(self.size + 1)]
        elif not self.shares:
            bounds = [count * rank // self.size for rank in range(self.size + 1)]
        else:
            total = sum(self.shares)
            before = [sum(self.shares[:rank]) for rank in range(self.size)]
            bounds = [*(int(count * share / total + 0.5) for share in before), count]
        return [slice(begin, end) for begin, end in pairwise(bounds)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all workers, in place."""
        if self.size > 1:
            self._group_for(tensor).all_reduce(tensor).wait()
        return tensor

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all workers. Waits for all of them."""
        if self.size == 1:
            return list(values)
        return self.max_over_workers(torch.tensor(list(values), dtype=torch.float64)).tolist()

    def max_over_workers(self, tensor: Tensor) -> Tensor:
        """Take the maximum of each element over all workers, in place."""
        if self.size > 1:
            self._group_for(tensor).all_reduce_max(tensor).wait()
        return tensor

    def _group_for(self, tensor: Tensor) -> Group:
        assert self.group is not None, "one process has no group"
        return self.cpu_group if self.cpu_group is not None and tensor.device.type == "cpu" else self.group

    def gather_values(self, value: Any) -> list[Any]:
        """Return the plain values of every worker, by rank, in two collectives for any number of workers."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        length = int(self.all_reduce_max([len(text)])[0])
        # Each worker fills its own row, padded with blanks; the sum over the workers is every row.
        rows = torch.zeros(self.size, length, dtype=torch.uint8)
        rows[self.rank] = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
        return [json.loads(bytes(row)) for row in self.all_reduce(rows).numpy()]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the main worker's tensors to all workers, in place."""
        if self.size == 1:
            return
        # Strided tensors are sent as contiguous copies: gloo writes past the end of an expanded tensor.
        sent = [tensor.detach().contiguous() for tensor in tensors]
        # All broadcasts start before the first is waited for, so that they overlap.
        for work in [self._group_for(tensor).broadcast(tensor) for tensor in sent]:
            work.wait()
        for tensor, received in zip(tensors, sent, strict=True):
            # An expanded tensor refuses to be written, so one that is right already is left alone.
            if not tensor.is_contiguous() and not torch.equal(tensor, received):
                tensor.detach().copy_(received)

    def axis(self, name: Axis) -> Group:
        """Return the group along an axis of the mesh, formed once. All workers must ask in the same order.

        The first axis uses the world's own group. Collectives of several axes may be under way at once, so
        that each further axis has a group of its own."""
        assert self.group is not None, "one process has no axes"
        if name not in self._mesh:
            self._mesh[name] = self._form_group() if self._mesh else self.group
        return self._mesh[name]

    def torch_group(self, axis: Axis) -> dist.ProcessGroup:
        """Return torch's own group along an axis, for code of torch that communicates by itself."""
        handle = self.axis(axis).handle
        assert isinstance(handle, dist.ProcessGroup)
        return handle

    def _form_group(self) -> Group:
        """Form one more group of the same workers, independent of the others. All workers must call."""
        if self.group_factory is not None:
            backend = "nccl" if self.cpu_group is not None else "gloo"
            return self.group_factory.form(backend, self.device)
        handle = dist.new_group(timeout=self.timeout)
        assert isinstance(handle, dist.ProcessGroup)
        _KEEP_ALIVE.append((handle, self.store))
        return Group(self.rank, self.size, handle)

    @property
    def membership(self) -> GroupMembership:
        """The membership in the current group; where the group cannot be left, one that never ends."""
        return self.group_factory.membership if self.group_factory is not None else GroupMembership()

    def barrier(self) -> None:
        if self.size > 1:
            self.all_reduce_max([0.0])

    def wait_for_main(self, name: str, value: Any = None) -> Any:
        """Wait until the main worker calls this too, however long its work for all takes.

        Returns the main worker's plain value. The wait may outlast the timeout of a collective. It
        ends with an error if the main worker is lost (its store is gone) or the group is left.
        ``name`` is used once per generation of the group.
        """
        if self.size == 1:
            return value
        store = self._store
        key = f"wait_for_main/{name}"
        if self.is_main:
            put_value(store, key, value, self.secret)
            return value
        return self._wait_for_value(key)

    def wait_for_all(self, name: str) -> None:
        """Wait until every worker calls this, however long it takes; the same as ``wait_for_main``."""
        if self.size == 1:
            return
        key = f"all/{name}"
        # The main worker alone looks at every worker's key: each of the others asks for a single one.
        if self.is_main:
            self.membership.wait_until(lambda: self.posted(key) is not None)
        else:
            self.post(key, None)
        self.wait_for_main(key)

    def post(self, name: str, value: Any) -> None:
        """Leave a plain value for the main worker. Any thread may call it; it waits for nobody.

        ``name`` is used once per generation of the group.
        """
        put_value(self._store, f"post/{name}/{self.rank}", value, self.secret)

    def posted(self, name: str) -> list[Any] | None:
        """Return the values that all other workers have posted, by rank, or None while one is missing.

        They are returned once, to the main worker.
        """
        store = self._store
        keys = [f"post/{name}/{rank}" for rank in range(1, self.size)]
        if not store.check(keys):
            return None
        found = [value for key in keys if (value := find_value(store, key, self.secret)) is not None]
        if len(found) < len(keys):
            return None
        for _, piece_keys in found:
            for key in piece_keys:
                store.delete_key(key)
        return [value for value, _ in found]

    def broadcast_value(self, name: str, value: Any) -> Any:
        """Return the plain value of the lowest rank that has one; ranks without one pass None.

        All workers must call it with the same name. The value is sent by collectives and not through
        the store, where others might reach it.
        """
        if self.size == 1:
            return value
        source = -self.all_reduce_max([-float(self.rank if value is not None else self.size)])[0]
        if source == self.size:
            return None
        text = json.dumps([name, value]).encode() if source == self.rank else b""
        length = int(self.all_reduce_max([len(text)])[0])
        # The others add zeros: the sum is the text of one worker.
        sent = torch.zeros(length, dtype=torch.uint8)
        if text:
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sent_name, sent_value = json.loads(bytes(self.all_reduce(sent).numpy()))
        if sent_name != name:
            raise RuntimeError(
                f"worker {self.rank} waited for the value {name!r}; worker {source:.0f} sent {sent_name!r}: "
                "they do not do the same steps"
            )
        return sent_value

    def _wait_for_value(self, key: str) -> Any:
        """Wait for a value of another worker. Anything else under its key counts as missing."""
        found: list[Any] = []

        def is_there() -> bool:
            value = find_value(self._store, key, self.secret)
            if value is not None:
                found.append(value[0])
            return bool(found)

        self.membership.wait_until(is_there)
        return found[0]

    @property
    def _store(self) -> Store:
        assert self.store is not None, "one process has no store"
        return self.store


_KEEP_ALIVE: list[Any] = []
"""References to destroyed groups, until the process ends.

Gloo's destructor waits for its threads while it holds the interpreter lock, and one of them may be waiting
for that lock: without the references one run in ten hung at its end.
"""


@contextmanager
def process_group_world(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    backend: str,
    timeout_s: float,
    secret: str = "",
) -> Iterator[World]:
    """Form torch's default process group and yield its world.

    With NCCL, tensors in host memory use gloo.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    group = Group(rank, size, dist.group.WORLD)
    world = World(rank, size, device, group, store, timeout=timeout, secret=secret)
    _KEEP_ALIVE.append((dist.group.WORLD, store))
    try:
        yield world
        # The store ends with the main worker, and the others may still be reading from it.
        world.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def recoverable_world(
    factory: GroupFactory, device: torch.device, backend: str, secret: str = ""
) -> Iterator[World]:
    """Form the groups of one generation and yield their world; they can be left while a collective hangs.

    The store belongs to another process, which outlives the generation.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        group = factory.form(backend, device)
        cpu_group = factory.form("gloo", device) if backend == "nccl" else None
        store = PrefixStore(f"{factory.name}/world", factory.store)
        yield World(
            factory.rank,
            factory.size,
            device,
            group,
            store,
            group_factory=factory,
            cpu_group=cpu_group,
            # With the generation: a value of another generation that someone writes again is invalid here.
            secret=f"{secret} {factory.name}",
        )
    finally:
        factory.close()
