"""The paths that this process writes, creates, renames or removes, seen by an audit hook.

Python cannot remove an audit hook: it is installed once and does nothing outside
``recorded_changes``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NUM_PATHS = {
    "open": 1,
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
}
"""How many of an event's first arguments are paths."""
_VIRTUAL = ("/dev/", "/proc/")
_recordings: list[list[Path]] = []


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if not _recordings or event not in _NUM_PATHS:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITE_FLAGS):
        return
    for path in arguments[: _NUM_PATHS[event]]:
        if isinstance(path, str | bytes | os.PathLike):
            full = os.path.abspath(os.fsdecode(path))
            if not full.startswith(_VIRTUAL):
                _recordings[-1].append(Path(full))


sys.addaudithook(_record)


@contextmanager
def recorded_changes() -> Iterator[list[Path]]:
    """Yield a list that receives the path of every change made in the block."""
    _recordings.append([])
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()
