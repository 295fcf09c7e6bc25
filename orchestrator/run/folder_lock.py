"""The lock of a run folder: one process at a time trains into it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from orchestrator.errors import UserError

LOCK = ".lock"
_HELD = frozenset({errno.EACCES, errno.EAGAIN})

_held_here: set[tuple[int, Path]] = set()
"""Processes, this one and those it was forked from, and the folders that they have locked.

The system does not refuse a lock to the process that holds it, and releases it when that process closes
any descriptor of the file: a folder of this process must be refused before its file is opened."""


_guard = threading.Lock()
"""Held while a thread looks at a lock, takes it or releases it: each opens or closes the file."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. The system releases it when the process ends, however it ends."""
    with _guard:
        held = _refuse_held_here(folder)
        file = _opened_lock(folder)
        _held_here.add(held)
    try:
        yield
    finally:
        with _guard:
            file.close()
            _held_here.discard(held)


def _opened_lock(folder: Path) -> IO[str]:
    """Open the file of the lock, take the lock, and write who holds it."""
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        _acquire(file, folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def check_unlocked(folder: Path) -> None:
    """Refuse a folder that a process trains into, this one or another."""
    with _guard:
        _refuse_held_here(folder)
        try:
            file = (folder / LOCK).open("r+", encoding="utf-8")
        except OSError:
            # No run yet, or a folder without permission to write, which is reported by its own check.
            return
        with file:
            _acquire(file, folder)


def _refuse_held_here(folder: Path) -> tuple[int, Path]:
    """Refuse a folder that this process trains into already. Return its entry of ``_held_here``."""
    held = (os.getpid(), folder.resolve())
    if held in _held_here:
        raise _still_going_on(folder, "in this process")
    return held


def _acquire(file: IO[str], folder: Path) -> None:
    try:
        # A POSIX lock is not inherited: loader processes that outlive a killed run do not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network drives have no locks. Training goes on without one there.
        if error.errno in _HELD:
            file.seek(0)
            owner = file.readline().strip() or "its process is not known"
            raise _still_going_on(folder, owner) from None


def _still_going_on(folder: Path, owner: str) -> UserError:
    return UserError(
        f"the run in {folder} is still going on ({owner}); wait for its end, or stop it first. "
        f"orchestrator watch {folder} shows it"
    )
