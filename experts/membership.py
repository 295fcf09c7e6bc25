"""A group membership that can be cancelled from outside.

The driver aborts a rank; blocked peers cannot tell which one failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep

_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.05
_POLL_SHARE = 0.05
"""The pause between two looks, as a share of the time waited so far: many hosts that wait long
would overload the store that they look into."""


class GroupLeft(RuntimeError):
    """The group was left while this host waited for the others."""


class GroupMembership:
    """A host's membership in one generation of a process group.

    It also holds what the heartbeat reports: whether this host waits for its peers, and how many
    waits have succeeded so far."""

    def __init__(self) -> None:
        self._left = threading.Event()
        self.waiting = False
        self.completed_waits = 0

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

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, without a time limit, or until the group is left."""
        self.waiting = True
        began_at = monotonic()
        try:
            while not condition():
                self.check()
                pause_s = _POLL_SHARE * (monotonic() - began_at)
                sleep(min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, pause_s)))
        finally:
            self.waiting = False
        self.completed_waits += 1
