"""Reader of an event log that another process writes: the driver shows and tracks the events of its workers.

Only whole lines are passed on. The bytes after the last newline are read again next time, so a torn
line waits for its rest, or for the writer that cuts it off (see ``EventLog``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.record.events import Event, Listener, parse_event

_logger = logging.getLogger("orchestrator")


class Follower:
    """Passes each new event of a growing file to its listeners, in order.

    Call ``poll`` now and then, and ``close`` at the end. ``from_offset`` is the number of bytes
    that are known already, such as ``whole_line_bytes(path)`` before a run is resumed; 0 by
    default.
    """

    def __init__(self, path: Path, listeners: Iterable[Listener], from_offset: int | None = None) -> None:
        self._path = path
        self._listeners = tuple(listeners)
        self._offset = whole_line_bytes(path, from_offset) if from_offset else 0
        self._file_id: tuple[int, int] | None = None
        self._failed: set[int] = set()
        self._is_closed = False
        self.finished = False
        """Whether the last ``start`` event was followed by an ``end`` event."""

    def poll(self) -> int:
        """Pass on the new events and return their number; a missing file has none yet."""
        lines = [] if self._is_closed else self._new_lines()
        events = [event for line in lines if (event := parse_event(line)) is not None]
        for event in events:
            self._pass_on(event)
        return len(events)

    def close(self) -> None:
        """Pass on the remaining events. The owners of the listeners close them."""
        self.poll()
        self._is_closed = True

    def _new_lines(self) -> list[bytes]:
        # Opened anew each time: on a network drive only an open shows the writes of another
        # machine.
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            size = self._synchronize(file)
            data = os.pread(file, size - self._offset, self._offset) if size > self._offset else b""
        finally:
            os.close(file)
        whole_bytes = data.rfind(b"\n") + 1
        self._offset += whole_bytes
        return data[:whole_bytes].split(b"\n")

    def _synchronize(self, file: int) -> int:
        """Return the size of the file, and correct the offset if the file was replaced or cut."""
        status = os.fstat(file)
        file_id = (status.st_dev, status.st_ino)
        if status.st_size < self._offset:
            is_new = status.st_size == 0 or file_id != self._file_id
            self._offset = 0 if is_new else whole_line_bytes(self._path, status.st_size)
        self._file_id = file_id
        return status.st_size

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


def whole_line_bytes(path: Path, max_bytes: int | None = None) -> int:
    """Return the number of bytes up to the last newline, within the first ``max_bytes`` if given."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return file.read(max_bytes).rfind(b"\n") + 1
