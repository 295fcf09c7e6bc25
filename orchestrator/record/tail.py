"""Reads along in a record that another process writes: the driver shows and tracks what its workers do.

Only whole lines are handed on, and what follows the last of them is read again next time. So a torn line simply waits for
its rest, or for the writer that cuts it off (see ``EventLog``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.record.events import Event, Listener, parse_event

_logger = logging.getLogger("orchestrator")


class Follower:
    """Hands each new event of a growing file to its readers, in order; ``poll`` now and then, ``close`` at the end.

    ``from_offset``: bytes that are known already, such as ``whole_lines(path)`` before a run is taken up; 0 by default.
    """

    def __init__(self, path: Path, readers: Iterable[Listener], from_offset: int | None = None) -> None:
        self._path = path
        self._readers = tuple(readers)
        self._offset = whole_line_bytes(path, from_offset) if from_offset else 0
        self._file_id: tuple[int, int] | None = None
        self._failed: set[int] = set()
        self._closed = False
        self.finished = False
        """Whether the run has told its end, and no other start since."""

    def poll(self) -> int:
        """Hands on what is new, and says how many events that were. A file that is not there yet has none."""
        lines = [] if self._closed else self._new_lines()
        events = [event for line in lines if (event := parse_event(line)) is not None]
        for event in events:
            self._hand_on(event)
        return len(events)

    def close(self) -> None:
        """Hands on what is left. The readers are closed by those who made them."""
        self.poll()
        self._closed = True

    def _new_lines(self) -> list[bytes]:
        # Opened anew each time: over a network drive only an open shows what another machine wrote.
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            size = self._place(file)
            data = os.pread(file, size - self._offset, self._offset) if size > self._offset else b""
        finally:
            os.close(file)
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return data[:whole].split(b"\n")

    def _place(self, file: int) -> int:
        """The size of the file, with the place to read from brought in line: a file of a new make is read from its beginning."""
        status = os.fstat(file)
        file_id = (status.st_dev, status.st_ino)
        if status.st_size < self._offset:
            new = status.st_size == 0 or file_id != self._file_id
            self._offset = 0 if new else whole_line_bytes(self._path, status.st_size)
        self._file_id = file_id
        return status.st_size

    def _hand_on(self, event: Event) -> None:
        if event["event"] in ("start", "end"):
            self.finished = event["event"] == "end"
        for index, reader in enumerate(self._readers):
            try:
                reader(event)
            except Exception as error:
                # Who reads along can neither end nor hold up the run, nor keep the others from reading.
                if index not in self._failed:
                    self._failed.add(index)
                    what, why = (
                        getattr(reader, "__name__", type(reader).__name__),
                        f"{type(error).__name__}: {error}",
                    )
                    _logger.warning(
                        "%s could not take the event %r (%s); the run goes on", what, event["event"], why
                    )


def whole_line_bytes(path: Path, within: int | None = None) -> int:
    """How many bytes of the file are whole lines, ``within`` its first so many bytes where told."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return file.read(within).rfind(b"\n") + 1
