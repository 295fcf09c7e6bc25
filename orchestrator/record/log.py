"""Where a worker's events go: to the run's record from the main one, nowhere from the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from orchestrator.record.events import Event


class Log(Protocol):
    def write(self, event: str, **fields: Any) -> None: ...

    def write_all(self, events: Iterable[Event]) -> None: ...

    def close(self) -> None: ...


class SilentLog:
    """Of a worker that is not the main one: all of them see the same events, and one tells."""

    def write(self, event: str, **fields: Any) -> None:
        pass

    def write_all(self, events: Iterable[Event]) -> None:
        pass

    def close(self) -> None:
        pass
