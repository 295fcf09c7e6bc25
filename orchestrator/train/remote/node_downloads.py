"""Remote checkpoints that the processes of a node download once, and read together.

A process that reads one holds a shared lock on it, so that no other process removes it meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from orchestrator.checkpoint.files import step_name
from orchestrator.train.remote.checkpoints import RemoteCheckpoint, RemoteCheckpoints
from orchestrator.train.remote.retry import retried


class NodeDownloads:
    """The checkpoints of one remote run on a node, each in a folder with its remote name."""

    def __init__(self, folder: Path, checkpoints: RemoteCheckpoints) -> None:
        self.folder = folder
        self._checkpoints = checkpoints

    def path_of(self, checkpoint: RemoteCheckpoint) -> Path:
        """Return where a checkpoint is once it is downloaded."""
        return self.folder / checkpoint.name / step_name(checkpoint.step)

    @contextmanager
    def reading(self, checkpoint: RemoteCheckpoint) -> Iterator[Path]:
        """Yield the path of a checkpoint, which stays there while the block runs.

        It is downloaded, unless a process of this node has done so. Raises ``CheckpointDamaged``."""
        path = self.path_of(checkpoint)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock_file(checkpoint.name) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            while not path.exists():
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    self.remove_unread(but=checkpoint.name)
                    retried(lambda: self._checkpoints.download(checkpoint, path.parent))
                # The change of a lock lets go of it for a moment, and another process may remove the copy.
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield path

    def remove_unread(self, but: str = "") -> None:
        """Make room: remove the checkpoints that no process downloads or reads now, except one."""
        for path in self.folder.glob("step_*"):
            if path.name == but:
                continue
            # A lock that another process holds, or a drive without locks.
            with suppress(OSError), self._lock_file(path.name) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Renamed first: a kill in between leaves no half checkpoint that passes for a whole one.
                removed = path.with_name(f".removing_{path.name}")
                shutil.rmtree(removed, ignore_errors=True)
                os.rename(path, removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _lock_file(self, name: str) -> IO[bytes]:
        return (self.folder / f".{name}.lock").open("ab")
