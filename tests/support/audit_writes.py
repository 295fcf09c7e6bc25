"""What this process writes, makes, renames or removes, wherever it is: seen by an audit hook, which Python keeps for good."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
}
_NOWHERE = ("/dev/", "/proc/")
_seen: list[list[Path]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _seen or (event != "open" and event not in _PATHS):
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    for path in arguments[: _PATHS.get(event, 1)]:
        if isinstance(path, str | bytes | os.PathLike):
            full = os.path.abspath(os.fsdecode(path))
            _seen[-1] += [] if full.startswith(_NOWHERE) else [Path(full)]


sys.addaudithook(_hook)


@contextmanager
def changes() -> Iterator[list[Path]]:
    """The paths of all that is changed meanwhile."""
    _seen.append([])
    try:
        yield _seen[-1]
    finally:
        _seen.pop()
