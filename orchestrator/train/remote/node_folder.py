"""The folder of a run on a node that does not see the driver's: its workers work and download there.

Processes hold shared locks on what they use: on the folder, which the last worker removes, and on each
checkpoint that they read, so that no other process removes it meanwhile.

A run that begins with a checkpoint of another remote run reads the driver's copy of it, where the node sees
that. Any other node downloads it here, once for all its workers, when it is needed: a run that has
checkpoints of its own restarts without it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO

from orchestrator.checkpoint.files import step_name
from orchestrator.config.reading.reader import Resolved
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.storage.folder import RemoteFolder, retried
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.checkpoints import CHECKPOINTS, RemoteCheckpoint, RemoteCheckpoints
from orchestrator.train.remote.remote_start import START, RemoteStart

_LOCK = ".lock"
WORKER = "worker-"
"""The beginning of the name of a worker's own folder."""


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


class NodeStart:
    """The checkpoint that a run begins with, for one worker."""

    def __init__(self, start: RemoteStart, node_folder: Path) -> None:
        """``node_folder`` is for all workers of this node."""
        self._start = start
        self._node_folder = node_folder
        self._copy = start.copy
        """The folder that stands for the remote run here: the driver's copy, or one with its small files."""

    @property
    def path(self) -> Path:
        """The checkpoint in the settings of this worker. Its files are where ``reading`` says."""
        return self._copy / CHECKPOINTS / step_name(self._start.checkpoint.step)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Write the small files of the other run, unless this node sees the driver's copy.

        Each worker has its own, at the same path when it joins again: a task may keep it."""
        if self._sees_copy():
            yield
            return
        own = self._node_folder / f"start-{socket.gethostname()}-{os.getpid()}"
        # The same name as that of the driver's copy: by it workers know the paths of each other.
        self._copy = own / self._start.copy.name
        try:
            for name, content in self._start.files.items():
                replace_file(self._copy / name, content)
            yield
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def _sees_copy(self) -> bool:
        try:
            return (self._start.copy / START).read_bytes() == self._start.files[START]
        except OSError:
            return False

    def prepared(self, prepared: PreparedRun) -> PreparedRun:
        """Return a run that begins with the checkpoint, as this worker finds it."""
        resolved = prepared.resolved
        config = self._start.with_location(resolved.config, self.path)
        earlier = self._copy if prepared.earlier == self._start.copy else prepared.earlier
        return replace(prepared, resolved=Resolved(config, resolved.origins), earlier=earlier)

    def holds(self, path: Path) -> bool:
        """Whether a path, of any worker, is that of the checkpoint."""
        return path.parent.parent.name == self._start.copy.name

    @contextmanager
    def reading(self) -> Iterator[Path]:
        """Yield the path of the checkpoint on this node. Raises ``CheckpointDamaged``."""
        if self._copy == self._start.copy:
            yield self.path
            return
        with self._downloads.reading(self._start.checkpoint) as path:
            yield path

    def remove_unread(self) -> None:
        """Make room: the run has checkpoints of its own from now on."""
        if self._copy != self._start.copy:
            self._downloads.remove_unread()

    @cached_property
    def _downloads(self) -> NodeDownloads:
        checkpoints = RemoteCheckpoints(RemoteFolder(self._start.url) / CHECKPOINTS)
        return NodeDownloads(self._node_folder / "start", checkpoints)
