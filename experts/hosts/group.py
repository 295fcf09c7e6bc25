"""Process groups of hosts. This is the only module of the library that uses torch.distributed.

Collectives go to the process group itself and not to torch's global one, so that several groups, of
several generations, can exist at once. A host can leave a group while a collective waits for a
frozen peer. Over gloo the host waits: gloo's own abort does not end the wait, but a host that waits
in short intervals can stop between two of them. Over NCCL the device waits: an abort ends its
kernels. The abandoned group is destroyed in a thread of its own, because its destructor waits for
the collectives under way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import sleep
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Backend, PrefixStore, Store
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from experts.hosts.device_waits import DeviceWaits
from experts.hosts.membership import GroupLeft, GroupMembership

_CPU = torch.device("cpu")
_POLL_INTERVAL = timedelta(milliseconds=100)
_STORE_POLL_SECONDS = 0.005
_NO_TIMEOUT = timedelta(days=30)  # the driver decides when a host has waited too long
# Gloo waits five times as long for the connection of a peer: a futile attempt ends after a minute.
_CONNECT_TIMEOUT = timedelta(seconds=12)
_GLOO_TIMEOUT_TEXT = "Operation timed out"  # gloo's error for work that is still under way


class AsyncWork(Protocol):
    """A collective under way. ``wait`` raises its error."""

    def wait(self) -> Any: ...


@dataclass
class _InterruptibleWork:
    """Gloo work whose wait ends when the group is left."""

    work: Any
    membership: GroupMembership

    def wait(self) -> None:
        self.membership.record_wait(self._wait_in_intervals)

    def _wait_in_intervals(self) -> None:
        while not self._completes():
            pass

    def _completes(self) -> bool:
        """Whether the work completes within the poll interval."""
        try:
            self.work.wait(_POLL_INTERVAL)
        except RuntimeError as error:
            # First of all: peers that leave close their connections, and that error is only a
            # consequence.
            self.membership.check()
            if _GLOO_TIMEOUT_TEXT not in str(error):
                raise
            return False
        return True


@dataclass
class _DeviceWork:
    """NCCL work, which the device waits for. An abort of the group ends that wait."""

    work: Any
    device_waits: DeviceWaits

    def wait(self) -> None:
        """Make the device wait, and record where: the heartbeat tells a waiting device from a stuck
        one by these two points."""
        self.device_waits.record_point()
        self.work.wait()
        self.device_waits.record_point()


@dataclass
class Group:
    """A process group of hosts, seen from one of them. Without a membership it cannot be left."""

    rank: int
    size: int
    handle: ProcessGroup | Backend | None
    membership: GroupMembership | None = None
    device_waits: DeviceWaits | None = None
    """Where the waits of a device are recorded; None if the host waits itself."""
    store: Store | None = None
    """Gloo may connect in its first collective, and keeps no reference to the Python part of a store."""

    def check(self) -> None:
        """Raise GroupLeft if the group was left.

        Call it after the host has waited for the device: an abort ends that wait too, and leaves
        wrong values."""
        if self.membership is not None:
            self.membership.check()

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        receive_counts: Sequence[int],
        send_counts: Sequence[int],
    ) -> AsyncWork:
        """Send rows to each host and receive rows from each; without counts, an even split.

        Both tensors must be contiguous and stay alive until the work is done."""
        options = AllToAllOptions()
        work = self._backend.alltoall_base(received, sent, list(receive_counts), list(send_counts), options)
        return self._interruptible(work)

    def all_reduce(self, tensor: Tensor) -> AsyncWork:
        """Sum over all hosts, in place."""
        return self._interruptible(self._backend.allreduce([tensor], AllreduceOptions()))

    def all_reduce_max(self, tensor: Tensor) -> AsyncWork:
        """Take the maximum of each element over all hosts, in place."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        return self._interruptible(self._backend.allreduce([tensor], options))

    def all_gather(self, gathered: Tensor, shard: Tensor) -> AsyncWork:
        """Collect a shard of each host, in the order of their ranks. Shards must be equally long."""
        return self._interruptible(self._backend._allgather_base(gathered, shard, AllgatherOptions()))

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> AsyncWork:
        """Sum over all hosts, and leave each host its shard of the sum."""
        options = ReduceScatterOptions()
        return self._interruptible(self._backend._reduce_scatter_base(shard, whole, options))

    def broadcast(self, tensor: Tensor) -> AsyncWork:
        """Copy the tensor of rank 0 to all hosts, in place."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._interruptible(self._backend.broadcast([tensor], options))

    @property
    def _backend(self) -> Any:
        if self.handle is None:
            raise GroupLeft("the group was left")
        return self.handle

    def _interruptible(self, work: Any) -> AsyncWork:
        """Return work whose wait ends when the group is left, and shows in the heartbeat."""
        if self.membership is None:
            return work
        if self.device_waits is None:
            return _InterruptibleWork(work, self.membership)
        return _DeviceWork(work, self.device_waits)


class _ConnectingStore(Store):
    """The store as gloo uses it to connect, with waits that end when the group is left.

    A peer that dies before it has published its address never will. A wait of torch's own store would go on
    to its timeout, and the attempt would keep its threads and sockets as long."""

    def __init__(self, store: Store, membership: GroupMembership) -> None:
        super().__init__()
        self._store = store
        self._membership = membership

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], _: timedelta | None = None) -> None:  # pyrefly: ignore[bad-override]
        while not self._store.check(keys):
            self._membership.check()
            sleep(_STORE_POLL_SECONDS)


@dataclass
class GroupFactory:
    """Forms the process groups of one generation, which end with it.

    A group is formed in a thread, because a host may be lost while it forms and the attempt cannot
    be interrupted."""

    store: Store
    name: str
    """Prefix of the store's keys, unique to the generation."""
    rank: int
    size: int
    membership: GroupMembership
    _groups: list[Group] = field(default_factory=list)
    _device_waits: DeviceWaits | None = None
    """Shared by all groups whose work the device waits for."""
    _to_abort: deque[Any] = field(default_factory=deque)
    """NCCL's groups, which are aborted when they are left."""
    _aborts_when_left: bool = False
    """Whether a thread waits to abort them."""
    _closed: threading.Event = field(default_factory=threading.Event)
    connecting: bool = False
    """Whether a thread that forms a group uses the store, perhaps in vain."""

    def form(self, backend: str = "gloo", device: torch.device = _CPU) -> Group:
        """Form one more group of the same hosts, whose collectives are independent of the others.

        All hosts must call it. ``device`` is where NCCL connects."""
        store = PrefixStore(f"{self.name}/{len(self._groups)}", self.store)
        # A counter, so that each host waits for a single key however many hosts there are.
        if store.add("arrived", 1) == self.size:
            store.set("all arrived", "")
        # Connecting cannot be interrupted, so that no host begins before all have arrived.
        self.membership.wait_until(lambda: store.check(["all arrived"]))
        if backend == "gloo":
            store = _ConnectingStore(store, self.membership)
        handle = self._connect(backend, store, device)
        group = Group(self.rank, self.size, handle, self.membership, store=store)
        self._groups.append(group)
        if backend != "gloo":
            group.device_waits = self._followed_waits(device)
            self._to_abort.append(handle)
            if not self._aborts_when_left:
                self._aborts_when_left = True
                threading.Thread(target=self._abort_when_left, name="aborting", daemon=True).start()
        return group

    def _followed_waits(self, device: torch.device) -> DeviceWaits:
        """Return the waits of the device, which the heartbeat reports from now on."""
        if self._device_waits is None:
            self._device_waits = DeviceWaits(device)
            self.membership.follow_device(self._device_waits)
        return self._device_waits

    def _connect(self, backend: str, store: Store, device: torch.device) -> Backend:
        outcome: list[Any] = []

        def connect() -> None:
            try:
                outcome.append(_new_backend(backend, store, self.rank, self.size, device))
            except Exception as error:
                # Without its frames: they hold ``outcome``, and a cycle would keep the store's client open.
                outcome.append(error.with_traceback(None))
            self.connecting = False

        self.connecting = True
        threading.Thread(target=connect, name="forming", daemon=True).start()
        self.membership.wait_until(lambda: bool(outcome))
        if isinstance(outcome[0], Exception):
            raise outcome.pop()
        return outcome[0]

    def _abort_when_left(self) -> None:
        """Abort the NCCL groups as soon as the generation is left or closed.

        NCCL's kernels wait on the device, and the host waits for the device: an abort ends both
        waits."""
        interval_s = _POLL_INTERVAL.total_seconds()
        while not self.membership.wait_until_left(interval_s) and not self._closed.is_set():
            pass
        self._abort_all()
        # A group that was forming when the generation was left comes late.
        while not self._closed.wait(interval_s):
            self._abort_all()
        self._abort_all()

    def _abort_all(self) -> None:
        """Abort all groups at once.

        The abort of one waits for its kernels, which may be queued behind those of another."""
        while self._to_abort:
            handle = self._to_abort.popleft()
            threading.Thread(target=handle.abort, name="abort", daemon=True).start()

    def close(self) -> None:
        """Abandon the groups, without waiting for collectives that hang in them."""
        handles = [(group.handle, group.store) for group in self._groups]
        for group in self._groups:
            group.handle = group.store = None
        self._groups = []
        self._closed.set()
        # The thread drops the last references, and so runs the destructors, which may block.
        threading.Thread(target=handles.clear, name="leaving", daemon=True).start()


def _new_backend(backend: str, store: Store, rank: int, size: int, device: torch.device) -> Backend:
    """Connect a new group. All hosts have arrived; a host that is lost meanwhile ends the attempt."""
    if backend == "gloo":
        gloo = ProcessGroupGloo(store, rank, size, _CONNECT_TIMEOUT)
        gloo._set_default_timeout(_NO_TIMEOUT)
        return gloo
    # Builds of torch without CUDA have no NCCL.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NO_TIMEOUT
    nccl = ProcessGroupNCCL(store, rank, size, options)
    # A communicator that connects in its first collective blocks the host, out of reach of an abort.
    nccl.eager_connect_single_device(device)
    return nccl
