"""The checkpoint of another remote run that a run begins with, as the workers of one node read it.

A node that sees the copy of the driver reads that one. Any other downloads the checkpoint, once for
all its workers, when it is needed: a run that has checkpoints of its own restarts without it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from orchestrator.checkpoint.files import step_name
from orchestrator.config.reading.reader import Resolved
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.storage.folder import RemoteFolder
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.checkpoints import CHECKPOINTS, RemoteCheckpoints
from orchestrator.train.remote.node_folder import NodeDownloads
from orchestrator.train.remote.remote_start import START, RemoteStart


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
