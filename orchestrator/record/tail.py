"""Reader of an event log that other processes write: the driver shows and tracks the events of its workers.

Only whole lines are passed on. The bytes after the last newline are read again next time, so a torn
line waits for its rest, or for the writer that cuts it off (see ``EventLog``).
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.record.events import (
    Event,
    Listener,
    PositionedEvent,
    driver_path,
    driver_position,
    merge_events,
    parse_lines,
    whole_line_bytes,
)

_logger = logging.getLogger("orchestrator")


class _GrowingFile:
    """Reads the new events of one file. ``offset`` is the number of bytes read so far."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self.offset = offset

    def new_events(self) -> list[PositionedEvent]:
        # Opened anew each time: on a network drive only an open shows the writes of another
        # machine.
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            size = self._synchronize(file)
            data = os.pread(file, size - self.offset, self.offset) if size > self.offset else b""
        finally:
            os.close(file)
        begin = self.offset
        whole_bytes = data.rfind(b"\n") + 1
        self.offset += whole_bytes
        return parse_lines(io.BytesIO(data[:whole_bytes]), begin)

    def _synchronize(self, file: int) -> int:
        """Return the size of the file, and correct the offset if the file was replaced or cut."""
        status = os.fstat(file)
        file_id = (status.st_dev, status.st_ino)
        if status.st_size < self.offset:
            is_new = status.st_size == 0 or file_id != self._file_id
            self.offset = 0 if is_new else whole_line_bytes(self._path, status.st_size)
        self._file_id = file_id
        return status.st_size


class Follower:
    """Passes each new event of a growing event log to its listeners, in order.

    The driver's events, which have a file of their own, come where they belong. Call ``poll`` now
    and then, and ``close`` at the end.
    """

    def __init__(self, path: Path, listeners: Iterable[Listener], only_new: bool = False) -> None:
        """``only_new``: without the events that are there already, as when a run is resumed."""
        self._listeners = tuple(listeners)
        self._workers = _GrowingFile(path, whole_line_bytes(path) if only_new else 0)
        own_path = driver_path(path)
        self._driver = _GrowingFile(own_path, whole_line_bytes(own_path) if only_new else 0)
        self._waiting: list[Event] = []
        """Events of the driver that follow lines of the workers which are not visible yet."""
        self._failed: set[int] = set()
        self._is_closed = False
        self.finished = False
        """Whether the last ``start`` event was followed by an ``end`` event."""

    def poll(self) -> int:
        """Pass on the new events and return their number; a missing file has none yet."""
        return self._poll(is_last=False)

    def close(self) -> None:
        """Pass on the remaining events. The owners of the listeners close them."""
        self._poll(is_last=True)
        self._is_closed = True

    def _poll(self, is_last: bool) -> int:
        if self._is_closed:
            return 0
        # The driver's file first: the lines that its events follow are then in the other one.
        self._waiting += [event for _, event in self._driver.new_events()]
        worker_events = self._workers.new_events()
        due: list[Event] = []
        while self._waiting and (is_last or driver_position(self._waiting[0]) <= self._workers.offset):
            due.append(self._waiting.pop(0))
        events = merge_events(worker_events, due)
        for event in events:
            self._pass_on(event)
        return len(events)

    def _pass_on(self, event: Event) -> None:
        if event["event"] in ("start", "end"):
            self.finished = event["event"] == "end"
        for index, listener in enumerate(self._listeners):
            try:
                listener(event)
            except Exception as error:
                # A listener can neither end nor delay the run, nor keep events from the other
                # listeners.
                if index not in self._failed:
                    self._failed.add(index)
                    _logger.warning(
                        "%s could not process the event %r (%s: %s); the run continues",
                        getattr(listener, "__name__", type(listener).__name__),
                        event["event"],
                        type(error).__name__,
                        error,
                    )
