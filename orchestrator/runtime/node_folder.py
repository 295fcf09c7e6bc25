"""The folder of a run on a node that does not see the driver's: its workers work and download there.

Each worker holds a shared lock on it. The last one that leaves removes it, whatever the order."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_LOCK = ".lock"
WORKER = "worker-"
"""How the name of a worker's own folder begins."""


def node_folder(nonce: str) -> Path:
    """Return the folder of a run on this node, for all its workers."""
    return Path(tempfile.gettempdir(), f"expert-orchestrator-{nonce}")


@contextmanager
def used_node_folder(nonce: str) -> Iterator[Path]:
    """Yield the folder of a run on this node. The last worker removes it, except folders of workers.

    A worker removes its own folder. One that is still there is of a worker that was killed, or that could
    not send all its files."""
    folder = node_folder(nonce)
    with _locked(folder) as lock:
        try:
            yield folder
        finally:
            # Without locks, or with another worker here, everything stays.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


def _locked(folder: Path) -> IO[bytes]:
    """Create the folder, and return its lock file, which is locked as long as it is open."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the last worker has removed the folder meanwhile
            lock = (folder / _LOCK).open("ab")
            try:
                with suppress(OSError):  # some network drives have no locks
                    fcntl.flock(lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / _LOCK)):
                    return lock
            except BaseException:
                lock.close()
                raise
            lock.close()


def _remove(folder: Path) -> None:
    if not list(folder.glob(f"{WORKER}*")):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith(WORKER):
            shutil.rmtree(path, ignore_errors=True)
