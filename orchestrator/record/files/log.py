"""Event logs of a worker: the main worker writes events to the run folder, the others discard them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from orchestrator.record.events.kinds import JsonEvent

Emit = Callable[..., None]
"""Writes an event: its kind, then its fields as keywords."""


class Log(Protocol):
    """Receiver of a worker's events."""

    def write(self, event: str, **fields: Any) -> None: ...

    def write_all(self, events: Iterable[JsonEvent]) -> None: ...

    def close(self) -> None: ...


class SilentLog:
    """Log of a worker that is not the main one: all workers have the same events, and one writes them."""

    def write(self, event: str, **fields: Any) -> None:
        pass

    def write_all(self, events: Iterable[JsonEvent]) -> None:
        pass

    def close(self) -> None:
        pass
