"""Event logs of a worker: the main worker writes events to the run folder, the others discard them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestrator.record.events.kinds import Event

Emit = Callable[[Event], None]


def ignore_event(_: Event) -> None:
    """Drop the events of a part of a run that is not recorded."""


class Log(Protocol):
    """Receiver of a worker's events."""

    def write(self, *events: Event) -> None: ...

    def close(self) -> None: ...


class SilentLog:
    """Log of a worker that is not the main one: all workers have the same events, and one writes them."""

    def write(self, *events: Event) -> None:
        pass

    def close(self) -> None:
        pass
