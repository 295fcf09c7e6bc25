"""The hosts as a group that can talk: the only place of this library that knows torch.distributed. It speaks to the process
group itself, not to torch's global one, so that several groups, and groups of several lives, stand beside each other.

A group can be left while a collective hangs on a host that is frozen: gloo's own abort does not end the waiting, but whoever waits a
little at a time can stop at any time. The old group is let go of in a thread of its own, for it waits for what is under way in it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions, AllToAllOptions, BroadcastOptions

from experts.membership import GroupLeft, GroupMembership

_A_LITTLE = timedelta(milliseconds=100)
_NEVER = timedelta(days=30)  # who has waited too long is decided from outside
_TO_CONNECT = timedelta(
    seconds=60
)  # for hosts that are all there: after it, what connects in vain is let go of
_STILL = "Operation timed out"  # what gloo says of work that is still under way


class Work(Protocol):
    """Something under way. ``wait`` raises what went wrong."""

    def wait(self) -> Any: ...


@dataclass
class _Waiting:
    """Work in a group that can be left."""

    work: Any
    membership: GroupMembership

    def wait(self) -> None:
        self.membership.waiting = True
        try:
            while not self._done():
                pass
        finally:
            self.membership.waiting = False
        self.membership.answers += 1

    def _done(self) -> bool:
        """Whether it was done within a little while."""
        try:
            self.work.wait(_A_LITTLE)
        except RuntimeError as error:
            self.membership.check()  # before the error: hosts that leave close their connections
            if _STILL not in str(error):
                raise
            return False
        return True


@dataclass
class Group:
    """A host's place among the hosts. Without a life it is as long as the process."""

    rank: int
    size: int
    handle: ProcessGroup | Backend | None
    membership: GroupMembership | None = None

    def check(self) -> None:
        """To be called when the host has waited for the device: an abort ends that too, and leaves figures that are none."""
        if self.membership is not None:
            self.membership.check()

    def all_to_all(
        self, received: Tensor, sent: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> Work:
        """Rows to each host and from each, as many as the lists say. Both tensors are contiguous and live until it is done."""
        return self._begun(
            self._there.alltoall_base(received, sent, list(receives), list(sends), AllToAllOptions())
        )

    def all_reduce(self, tensor: Tensor) -> Work:
        """The sum over all hosts, in place."""
        return self._begun(self._there.allreduce([tensor], AllreduceOptions()))

    def all_reduce_max(self, tensor: Tensor) -> Work:
        """The largest of each element over all hosts, in place."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue]
        return self._begun(self._there.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor) -> Work:
        """The first host's tensor, to all, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._begun(self._there.broadcast([tensor], options))

    @property
    def _there(self) -> Any:
        if self.handle is None:
            raise GroupLeft("the group was left")
        return self.handle

    def _begun(self, work: Any) -> Work:
        """NCCL's work is waited for by the device, which an abort releases; gloo's by the host."""
        return (
            _Waiting(work, self.membership)
            if self.membership is not None and isinstance(self.handle, ProcessGroupGloo)
            else work
        )


@dataclass
class GroupFactory:
    """The groups of one life. They are formed in a thread, for a host may be lost while they form, and end with the life."""

    store: Store
    name: str
    rank: int
    size: int
    membership: GroupMembership
    _formed: list[Group] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    connecting: bool = False
    """Whether the store is in use by a thread that connects, perhaps in vain."""

    def form(self, backend: str = "gloo") -> Group:
        """One more group of the same hosts, whose messages do not wait for those of the others. All must ask."""
        place = PrefixStore(f"{self.name}/{len(self._formed)}", self.store)
        place.set(f"here/{self.rank}", "")
        everyone = [f"here/{rank}" for rank in range(self.size)]
        self.membership.until(
            lambda: place.check(everyone)
        )  # what connects cannot be left: nobody begins before all are there
        found: list[Any] = []

        def make() -> None:
            try:
                found.append(_made(backend, place, self.rank, self.size))
            except Exception as error:
                found.append(error)
            self.connecting = False

        self.connecting = True
        threading.Thread(target=make, name="forming", daemon=True).start()
        self.membership.until(lambda: bool(found))
        if isinstance(found[0], Exception):
            raise found[0]
        self._formed.append(Group(self.rank, self.size, found[0], self.membership))
        if backend != "gloo":
            threading.Thread(
                target=_abort_in_time,
                args=(found[0], self.membership, self._over),
                name="aborting",
                daemon=True,
            ).start()
        return self._formed[-1]

    def close(self) -> None:
        """Let go of the groups, without waiting for what hangs in them."""
        handles = [group.handle for group in self._formed]
        for group in self._formed:
            group.handle = None
        self._formed = []
        self._over.set()
        threading.Thread(target=_let_go, args=(handles,), name="leaving", daemon=True).start()


def _made(backend: str, store: Store, rank: int, size: int) -> Backend:
    if backend == "gloo":
        made = ProcessGroupGloo(store, rank, size, _TO_CONNECT)
        made._set_default_timeout(_NEVER)
        return made
    from torch.distributed import ProcessGroupNCCL

    return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())


def _let_go(handles: list[Any]) -> None:
    handles.clear()


def _abort_in_time(handle: Any, life: GroupMembership, over: threading.Event) -> None:
    """NCCL's kernels wait on the device, and the host for the device: an abort releases both, as soon as the group is left."""
    while not life.left and not over.wait(_A_LITTLE.total_seconds()):
        pass
    handle.abort()
