"""A host of experts as a Ray actor.

The actor owns one device and runs the work that it is given, a segment at a time. It knows nothing
about training: the training code arrives as a function. The driver grants segments ahead: their calls
wait in the actor's queue, and the host goes from one to the next without waiting for the driver.
Inside a segment there is no Ray call.

Next to the thread that works, the actor has one thread per concurrency group. So the driver can
make a host leave its group while the host waits for its peers, and can fetch snapshots while the
host trains. A snapshot is the return value of an actor call and not an object that the host puts:
the driver owns it, and it outlives the host."""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from experts.hosts.membership import GroupMembership

_LOG = logging.getLogger(__name__)

BackupKey = tuple[int, int, int]
"""The generation, rank and step of a snapshot."""


class HostedWork(Protocol):
    """Work that a host does in segments, such as a number of training steps."""

    def run_segment(self, segment: Any) -> Any: ...


SnapshotParts = tuple[Any, Any, Any]
"""The header of a snapshot, the bytes that this host alone holds, and those of the dense part."""


class Outbox:
    """A mailbox with one place. Writers wait until it is empty, readers until it is full."""

    def __init__(self) -> None:
        self._place: queue.Queue[SnapshotParts] = queue.Queue(maxsize=1)

    def wait_for_space(self, membership: GroupMembership) -> None:
        """Wait until the last item is being fetched; the item before it has then arrived.

        A slow transfer is no fault of this host: it counts as waiting."""
        membership.wait_until(self._place.empty)

    def put(self, header: Any, own: Any, dense: Any) -> None:
        """Put the next item. The caller has waited for space: no item is replaced before it is fetched."""
        try:
            self._place.put_nowait((header, own, dense))
        except queue.Full:
            raise RuntimeError(
                "the last snapshot has not been fetched; call wait_for_space before put"
            ) from None

    def fetch(self) -> SnapshotParts:
        return self._place.get()

    def empty(self) -> None:
        with suppress(queue.Empty):
            self._place.get_nowait()


@dataclass
class HostContext:
    """The context of hosted work: its group membership, the mailbox for snapshots, and a cache.

    The cache outlives the membership: modules and data that a host has loaded serve the next group too."""

    membership: GroupMembership
    outbox: Outbox
    cache: dict[str, Any] = field(default_factory=dict)


# pyrefly: ignore[unexpected-keyword]
@ray.remote(concurrency_groups={"control": 1, "snapshots": 1, "backups": 1, "liveness": 1})
class ExpertHost:
    """One host. It does one piece of work at a time; its imports and its cache serve the next one."""

    def __init__(self) -> None:
        self._work: HostedWork | None = None
        self._stack = ExitStack()
        self._context = HostContext(GroupMembership(), Outbox())
        self._generation = -1
        self._last_generation_left = -1
        # Guards the generations and the membership: ``join`` and ``leave`` run in different threads.
        self._lock = threading.Lock()
        self._backups: dict[BackupKey, tuple[Any, Any]] = {}
        """The bytes of a host's own part and of the dense part."""

    def warm_up(self, preload: Callable[..., None], *arguments: Any) -> tuple[str, int]:
        """Call ``preload(context, *arguments)``. Return the id of this node and of this process."""
        preload(self._context, *arguments)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="liveness")
    def block_until_death(self) -> None:
        """Block as long as the host lives: the call fails when the host dies."""
        threading.Event().wait()

    def rendezvous_address(self) -> tuple[str, int]:
        """Return an address and a free port where hosts can form a group."""
        return free_address()

    def open(self, start: Callable[..., AbstractContextManager[HostedWork]], *arguments: Any) -> None:
        """Prepare work without a membership: ``start(*arguments)``."""
        self.close()
        self._context.membership = GroupMembership()
        self._work = self._stack.enter_context(start(*arguments))

    def join(
        self, start: Callable[..., AbstractContextManager[HostedWork]], generation: int, *arguments: Any
    ) -> None:
        """Join the group of a generation and prepare the work in it.

        ``start(context, *arguments)`` returns the work."""
        self.close()
        with self._lock:
            self._context.membership = GroupMembership()
            self._generation = generation
            self._context.outbox.empty()
            # ``leave`` may overtake ``join``: they arrive in different threads.
            if self._last_generation_left >= generation:
                self._context.membership.leave()
        self._work = self._stack.enter_context(start(self._context, *arguments))

    def run_segment(self, segment: Any) -> Any:
        """Work for one segment. Return the result of the work.

        Return None at once if an earlier segment has failed: this one was granted before that."""
        if self._work is None:
            return None
        try:
            self._context.membership.check()
            return self._work.run_segment(segment)
        except BaseException:
            # Closing the work finishes what it writes in the background, such as a checkpoint.
            self._work = None
            self._close_after_error()
            raise

    def _close_after_error(self) -> None:
        """Close the work. A second error is logged: it must not hide the first, which is raised."""
        try:
            self._stack.__exit__(*sys.exc_info())
        except Exception:
            _LOG.exception("closing the work after an error failed too")

    def close(self) -> None:
        """End the work."""
        self._work = None
        self._stack.close()

    @ray.method(concurrency_group="control")
    def leave(self, generation: int) -> None:
        """Leave the group of this or an earlier generation: the work stops waiting for its peers."""
        with self._lock:
            self._last_generation_left = max(self._last_generation_left, generation)
            if self._generation <= generation:
                self._context.membership.leave()

    @ray.method(concurrency_group="snapshots", num_returns=3)
    def next_snapshot(self) -> SnapshotParts:
        """Wait for the next snapshot of this host. Its parts are separate objects, so that another
        host can fetch the dense part alone."""
        return self._context.outbox.fetch()

    @ray.method(concurrency_group="backups")
    def store_backup(
        self, key: BackupKey, own: Any, dense: Any, complete_set: tuple[int, int] | None
    ) -> None:
        """Keep another host's snapshot in this process.

        Delete the backups of all other snapshot sets except the complete one; ``complete_set`` is its
        generation and step. The bytes are copied out of the object store, which loses them with the node
        of the other host."""
        generation, _, step = key
        kept = {complete_set, (generation, step)}
        self._backups = {
            known: backup for known, backup in self._backups.items() if (known[0], known[2]) in kept
        }
        self._backups[key] = own.copy(), dense.copy()

    @ray.method(concurrency_group="backups", num_returns=2)
    def load_backup(self, key: BackupKey) -> tuple[Any, Any]:
        """Return the backup of another host's snapshot: the bytes of its own part and of its dense part."""
        return self._backups[key]


def free_address() -> tuple[str, int]:
    """Return this node's address and a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def common_address(addresses: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the address at which hosts can form a group: the first of their ``addresses``.

    Hosts on one node use the loopback interface, which no other machine reaches."""
    address, port = addresses[0]
    is_one_node = len({host for host, _ in addresses}) == 1
    return ("127.0.0.1" if is_one_node else address), port
