"""Event files that grow while they are read: on a disk, or as objects of a remote folder."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Protocol

from orchestrator.record.files.reading import PositionedEvent, parse_lines, whole_line_bytes
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


def new_events(file: GrowingFile, max_bytes: int | None = None) -> tuple[list[PositionedEvent], bool]:
    """Return the next events of a file in whole lines, and whether there may be more of them already.

    ``max_bytes`` are read at once, unless a line is longer."""
    data = file.read(max_bytes)
    if len(data) == max_bytes and b"\n" not in data:
        data = file.read(None)
    begin = file.offset
    whole_bytes = data.rfind(b"\n") + 1
    file.offset += whole_bytes
    events = parse_lines(io.BytesIO(data[:whole_bytes]), begin)
    return events, whole_bytes > 0 and len(data) == max_bytes
