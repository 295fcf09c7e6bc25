"""Reader of an event log that other processes write: the driver shows and tracks the events of its workers.

Only whole lines are passed on. The bytes after the last newline are read again next time, so a torn
line waits for its rest, or for the writer that cuts it off (see ``EventLog``).
"""

from __future__ import annotations

import io
import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from orchestrator.record.events.kinds import End, Event, JsonEvent, Start, decode_event
from orchestrator.record.files.event_log import Listener
from orchestrator.record.files.reading import (
    START,
    Extent,
    driver_path,
    merge_lines,
    parse_event,
    whole_line_bytes,
    without_position,
)
from orchestrator.storage.folder import RemoteFolder


class GrowingFile(Protocol):
    """An event file. ``offset`` is the number of bytes read so far."""

    offset: int

    def read(self, max_bytes: int | None) -> bytes:
        """Return the bytes from the offset on, at most ``max_bytes``; empty if there is no file yet.

        Corrects the offset if the file was replaced or cut."""
        ...


class LocalFile:
    """A file on a disk."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self.offset = offset

    def read(self, max_bytes: int | None) -> bytes:
        # Opened anew each time: on a network drive only an open shows the writes of another
        # machine.
        try:
            # NONBLOCK: to open a pipe would wait for a writer. It has no bytes, as a device has none.
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return b""
        try:
            num_bytes = max(0, self._synchronize(file) - self.offset)
            wanted = num_bytes if max_bytes is None else min(num_bytes, max_bytes)
            return os.pread(file, wanted, self.offset)
        finally:
            os.close(file)

    def _synchronize(self, file: int) -> int:
        """Return the size of the file, and correct the offset if the file was replaced or cut."""
        status = os.fstat(file)
        file_id = (status.st_dev, status.st_ino)
        if status.st_size < self.offset:
            is_new = status.st_size == 0 or file_id != self._file_id
            self.offset = 0 if is_new else whole_line_bytes(self._path, status.st_size)
        self._file_id = file_id
        return status.st_size


class RemoteFile:
    """An object of a remote folder, which a run replaces by a longer one now and then."""

    def __init__(self, folder: RemoteFolder, name: str, offset: int = 0) -> None:
        self._folder = folder
        self._name = name
        self.offset = offset

    def read(self, max_bytes: int | None) -> bytes:
        size = self._folder.size(self._name) or 0
        # A shorter object is that of another run: uploads begin with whole lines.
        if size < self.offset:
            self.offset = 0
        end = size if max_bytes is None else min(size, self.offset + max_bytes)
        return self._folder.read_range(self._name, self.offset, end) if end > self.offset else b""


def new_lines(file: GrowingFile, max_bytes: int | None = None) -> tuple[int, bytes, bool]:
    """Return the byte at which the next whole lines of a file begin, these lines, and whether there may be
    more of them already.

    ``max_bytes`` are read at once, unless a line is longer."""
    data = file.read(max_bytes)
    if len(data) == max_bytes and b"\n" not in data:
        data = file.read(None)
    begin = file.offset
    lines = data[: data.rfind(b"\n") + 1]
    file.offset += len(lines)
    return begin, lines, len(lines) > 0 and len(data) == max_bytes


MAX_BYTES = 2**23
"""Bytes that are read at once: all events of a long run would fill the memory."""

_logger = logging.getLogger("orchestrator")


class Follower:
    """Passes each new event of a growing event log to its listeners, in order.

    The driver's events, which have a file of their own, come where they belong. Call ``poll`` now
    and then, and ``close`` at the end.
    """

    def __init__(
        self,
        path: Path,
        listeners: Iterable[Listener],
        begin: Extent = START,
        *,
        remote: RemoteFolder | None = None,
    ) -> None:
        """``begin``: without the events before, as when a run is resumed.

        ``remote`` is the folder of the log, and ``path`` its name there, if it lies in a remote folder."""
        self._listeners = tuple(listeners)
        self._workers = _growing_file(path, begin.workers, remote)
        self._driver = _growing_file(driver_path(path), begin.driver, remote)
        self._waiting: deque[JsonEvent] = deque()
        """Events of the driver that follow lines of the workers which are not visible yet."""
        self._failed: set[int] = set()
        self._is_closed = False
        self.finished = False
        """Whether the last ``start`` event was followed by an ``end`` event."""

    def poll(self) -> int:
        """Pass on the new events and return their number; a missing file has none yet."""
        if self._is_closed:
            return 0
        num_events = 0
        is_behind = True
        while is_behind:
            # The driver's file first: the lines that its events follow are then in the other one.
            _, driver_lines, _ = new_lines(self._driver)
            events = map(parse_event, io.BytesIO(driver_lines))
            self._waiting += [event for event in events if event is not None]
            begin, lines, is_behind = new_lines(self._workers, MAX_BYTES)
            num_events += self._read(merge_lines(io.BytesIO(lines), begin, self._waiting))
        return num_events

    def close(self) -> None:
        """Pass on the remaining events. The owners of the listeners close them."""
        self.poll()
        self._read(map(without_position, self._waiting))
        self._waiting.clear()
        self._is_closed = True

    def _read(self, lines: Iterable[bytes | JsonEvent]) -> int:
        """Pass on the events of lines, and return their number."""
        num_events = 0
        for line in lines:
            content = parse_event(line) if isinstance(line, bytes) else line
            if content is None:
                continue
            num_events += 1
            event = decode_event(content)
            if event is not None:
                self._pass_on(event)
        return num_events

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, Start | End):
            self.finished = isinstance(event, End)
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
                        event.EVENT,
                        type(error).__name__,
                        error,
                    )


def _growing_file(path: Path, offset: int, remote: RemoteFolder | None) -> GrowingFile:
    return LocalFile(path, offset) if remote is None else RemoteFile(remote, path.name, offset)
