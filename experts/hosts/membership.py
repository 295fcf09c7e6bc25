"""A group membership that can be cancelled from outside, and the waits of its host.

The driver aborts a rank; blocked peers cannot tell which one failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import NamedTuple, Protocol

_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.05
_POLL_SHARE = 0.05
"""The pause between two looks, as a share of the time waited so far: many hosts that wait long
would overload the store that they look into."""


class GroupLeft(RuntimeError):
    """The group was left while this host waited for the others."""


class WaitState(NamedTuple):
    """The waits of a host, as its heartbeat reports them."""

    num_completed: int
    waiting: bool
    """Whether the host or its device waits for the peers now."""


class ObservedWaits(Protocol):
    """The waits of a device for the peers of its host."""

    def observe(self) -> WaitState: ...


class GroupMembership:
    """A host's membership in one generation of a process group.

    It also records the waits for the peers: a host that waits is not stuck, and a wait that ends
    is progress. Over gloo the host waits itself; over NCCL its device waits, and the host is not
    told when."""

    def __init__(self) -> None:
        self._left = threading.Event()
        self._host_waits = False
        self._num_completed = 0
        self._device_waits: ObservedWaits | None = None

    def leave(self) -> None:
        """End all waiting in this group. May be called from any thread."""
        self._left.set()

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def check(self) -> None:
        """Raise ``GroupLeft`` if the group was left."""
        if self._left.is_set():
            raise GroupLeft("the group was left")

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait for the group to be left. Return whether it was."""
        return self._left.wait(timeout_s)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, without a time limit, or until the group is left."""

        def poll() -> None:
            began_at = monotonic()
            while not condition():
                self.check()
                pause_s = _POLL_SHARE * (monotonic() - began_at)
                sleep(min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, pause_s)))

        self.record_wait(poll)

    def record_wait(self, wait: Callable[[], None]) -> None:
        """Run a function in which this host waits for its peers."""
        self._host_waits = True
        try:
            wait()
        finally:
            self._host_waits = False
        self._num_completed += 1

    def follow_device(self, waits: ObservedWaits) -> None:
        """Count the waits of the host's device too."""
        self._device_waits = waits

    def observe(self) -> WaitState:
        """Return the state of the waits. Called by the thread that sends heartbeats."""
        if self._device_waits is None:
            return WaitState(self._num_completed, self._host_waits)
        device = self._device_waits.observe()
        return WaitState(self._num_completed + device.num_completed, self._host_waits or device.waiting)
