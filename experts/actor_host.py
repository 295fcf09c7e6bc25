"""A host of experts as a Ray actor: it owns one device and runs what it is handed, in segments. It knows nothing of training:
that comes with the function it is given. Between segments the driver may look after it; within one, no Ray call is made."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import ray


class Work(Protocol):
    """What a host works at, a segment at a time: of so many steps, or whatever else the work is measured in."""

    def advance(self, segment: Any) -> Any: ...


@ray.remote
class ExpertHost:
    """One host. It works at one thing at a time; what it has imported stays for the next."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._stack = ExitStack()

    def meeting_place(self) -> tuple[str, int]:
        """An address and a free port at which the hosts can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def open(self, make: Callable[..., AbstractContextManager[Work]], *arguments: Any) -> None:
        """Prepare to work: ``make(*arguments)``."""
        self.close()
        self._work = self._stack.enter_context(make(*arguments))

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
