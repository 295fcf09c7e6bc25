"""A host's membership in a group: whoever waits for the others stops waiting when the group is left. Who leaves is told from outside:
of hosts that wait for each other none can know which one is to blame."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep

_LOOK_SECONDS = 0.002


class GroupLeft(RuntimeError):
    """The group was left while this host waited for the others."""


class GroupMembership:
    """One life of a group. Beside the wish to leave it holds what an onlooker wants to know: whether this host waits for the others, and
    how often it has got what it waited for."""

    def __init__(self) -> None:
        self._left = threading.Event()
        self.waiting = False
        self.answers = 0

    def leave(self) -> None:
        """From any thread: nobody here waits any longer."""
        self._left.set()

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def check(self) -> None:
        if self._left.is_set():
            raise GroupLeft("the group was left")

    def until(self, there: Callable[[], bool]) -> None:
        """Wait until something is there, however long it takes, or until the group is left."""
        self.waiting = True
        try:
            while not there():
                self.check()
                sleep(_LOOK_SECONDS)
        finally:
            self.waiting = False
        self.answers += 1
