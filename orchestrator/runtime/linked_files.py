"""The files of a run folder that a link sends to the driver: which they are, and how they grow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from orchestrator.record.files.events import truncate_torn_line, whole_line_bytes
from orchestrator.record.files.remote_record import EVENTS, is_needed
from orchestrator.train.remote.publish_requests import FOLDER as PUBLISH_REQUESTS

_EVENTS_TAIL_BYTES = 2**20


def begin_files(run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield the small files of a run that a worker reads: settings, plan, kept files of the task."""
    for name, path in run_files(run_dir):
        if not name.startswith("events.") and is_needed(name):
            yield name, path
    # By its manifest a task learns that there is a checkpoint.
    for path in run_dir.glob("checkpoints/step_*/manifest.json"):
        yield path.relative_to(run_dir).as_posix(), path


def run_files(run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of a run folder, without checkpoints and hidden files."""
    for parent, folders, names in os.walk(run_dir):
        base = Path(parent).relative_to(run_dir)
        folders[:] = sorted(name for name in folders if name != "checkpoints" and not name.startswith("."))
        # The events are in the folder itself, which comes before those in it.
        for name in sorted(names, key=lambda name: (name != EVENTS, name)):
            path = Path(parent, name)
            # A socket or a pipe of the user's code has nothing to send.
            if not name.startswith(".") and path.is_file():
                yield (base / name).as_posix(), path
    requests = run_dir / PUBLISH_REQUESTS
    for path in sorted(requests.glob("[!.]*.request")):
        yield (PUBLISH_REQUESTS / path.name).as_posix(), path


def file_version(path: Path) -> tuple[int, int]:
    """Return size and time of a file; zeros if it is gone."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return 0, 0


def piece_end(path: Path, begin: int, size: int, max_bytes: int) -> int:
    """Return where a piece of a file ends that is sent at once: of the events, after a whole line.

    So a server that was restarted knows a torn line for one that it could not write to its end."""
    end = min(size, begin + max_bytes)
    if path.name != EVENTS or end == size:
        return end
    whole_bytes = whole_line_bytes(path, end)
    return whole_bytes if whole_bytes > begin else size  # a line may be longer than a piece


def read_range(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def events_tail(path: Path) -> bytes:
    """Return the last whole lines of the events."""
    end = whole_line_bytes(path)
    begin = max(0, end - _EVENTS_TAIL_BYTES)
    data = read_range(path, begin, end) if end else b""
    return data.partition(b"\n")[2] if begin else data


def append(path: Path, data: bytes) -> None:
    """Append to a file, as a whole or not at all unless this process is killed."""
    size, _ = file_version(path)
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        # The worker sends the same bytes again. On a full disk they must not follow a part of them.
        with suppress(OSError):
            os.truncate(path, size)
        raise


def unwritten(path: Path, data: bytes) -> bytes:
    """Return what a killed process has not appended of some bytes that are sent again.

    Events are sent in whole lines (``piece_end``): a torn one is a part of these bytes, and is cut off."""
    first = data
    if path.name == EVENTS:
        truncate_torn_line(path)
        # No two events are the same, as each has its time; lines of a log may be.
        first = data[: data.find(b"\n") + 1]
    size, _ = file_version(path)
    end = read_range(path, max(0, size - len(data)), size) if size else b""
    begin = end.find(first)
    while begin >= 0 and not data.startswith(end[begin:]):
        begin = end.find(first, begin + 1)
    return data if begin < 0 else data[len(end) - begin :]
