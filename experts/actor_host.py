"""A host of experts as a Ray actor: it owns one device and runs what it is handed, in segments. It knows nothing of training:
that comes with the function it is given. Between segments the driver may look after it; within one, no Ray call is made.

Beside the thread that works there are others, so that a host can be told to leave its group while it waits for the others, and
copies of its state can be fetched while it goes on. A copy is the return value of a call, not an object that the host puts: the
driver owns it, and it outlives the host."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from experts.membership import GroupMembership


class Work(Protocol):
    """What a host works at, a segment at a time: of so many steps, or whatever else the work is measured in."""

    def advance(self, segment: Any) -> Any: ...


class Outbox:
    """Room for one thing that is to be fetched. Whoever puts waits for room, whoever fetches for something."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: tuple[Any, Any] | None = None

    def make_room(self, life: GroupMembership) -> None:
        """Wait until what was put last is being fetched, and so what was put before it has been."""
        with self._changed:
            while self._held is not None:
                life.check()
                self._changed.wait(0.05)

    def put(self, header: Any, data: Any) -> None:
        with self._changed:
            self._held = header, data
            self._changed.notify_all()

    def fetch(self) -> tuple[Any, Any]:
        with self._changed:
            while self._held is None:
                self._changed.wait()
            held, self._held = self._held, None
            self._changed.notify_all()
            return held

    def empty(self) -> None:
        with self._changed:
            self._held = None
            self._changed.notify_all()


@dataclass
class Side:
    """What work as a member of a group has beside it: its membership, where copies are put, and what it remembers from one
    membership to the next."""

    membership: GroupMembership
    outbox: Outbox
    memory: dict[str, Any] = field(default_factory=dict)


@ray.remote(concurrency_groups={"side": 1, "copies": 1, "kept": 1, "life": 1})  # pyright: ignore[reportCallIssue]
class ExpertHost:
    """One host. It works at one thing at a time; what it has imported stays for the next."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._stack = ExitStack()
        self._side = Side(GroupMembership(), Outbox())
        self._epoch, self._left = -1, -1
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int, int], tuple[Any, Any]] = {}

    def warm(self, rehearse: Callable[..., None], *arguments: Any) -> tuple[str, int]:
        """Get ready: ``rehearse(side, *arguments)``. Returns the node and the process that this is."""
        rehearse(self._side, *arguments)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Ends with the host, and not before: whoever asked knows when it dies."""
        threading.Event().wait()

    def meeting_place(self) -> tuple[str, int]:
        """An address and a free port at which the hosts can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def open(self, make: Callable[..., AbstractContextManager[Work]], *arguments: Any) -> None:
        """Prepare to work: ``make(*arguments)``."""
        self.close()
        self._work = self._stack.enter_context(make(*arguments))

    def join(self, make: Callable[..., AbstractContextManager[Work]], epoch: int, *arguments: Any) -> None:
        """Become a member of the group of that epoch, and prepare to work in it: ``make(side, *arguments)``."""
        self.close()
        with self._lock:
            self._side.membership, self._epoch = GroupMembership(), epoch
            self._side.outbox.empty()
            if self._left >= epoch:
                self._side.membership.leave()
        self._work = self._stack.enter_context(make(self._side, *arguments))

    def advance(self, segment: Any) -> Any:
        """Work for a segment. Returns what the work returns."""
        assert self._work is not None, "advance before open"
        try:
            return self._work.advance(segment)
        except BaseException:  # what is being written is written to its end
            self._work = None
            self._stack.__exit__(*sys.exc_info())
            raise

    def close(self) -> None:
        """The work is over."""
        self._work = None
        self._stack.close()

    @ray.method(concurrency_group="side")
    def leave(self, epoch: int) -> None:
        """Whoever waits in the group of that epoch, or of one before, stops waiting."""
        with self._lock:
            self._left = max(self._left, epoch)
            if self._epoch <= epoch:
                self._side.membership.leave()

    @ray.method(concurrency_group="copies", num_returns=2)
    def copy(self) -> tuple[Any, Any]:
        """The next copy of this host's state: what it holds, and the bytes."""
        return self._side.outbox.fetch()

    @ray.method(concurrency_group="kept")
    def keep(self, key: tuple[int, int, int], header: Any, data: Any, oldest: int) -> None:
        """Keep a copy of another host's, in this process's own memory, by epoch, rank and step; those of steps before the ``oldest``
        are let go of."""
        self._kept = {known: kept for known, kept in self._kept.items() if known[2] >= oldest}
        self._kept[key] = header, data.copy()

    @ray.method(concurrency_group="kept", num_returns=2)
    def kept(self, key: tuple[int, int, int]) -> tuple[Any, Any]:
        """The copy that is kept of another host."""
        return self._kept[key]
