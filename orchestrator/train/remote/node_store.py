"""The checkpoints of a run whose nodes share no disk, as one worker sees them.

Each host writes its files to its own disk and uploads them. When all have, the main host asks the
driver to publish the checkpoint. To read one, a node downloads it, once for all its processes."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.checkpoint.files import manifest_bytes
from orchestrator.checkpoint.hashed_file import Hashes, no_progress
from orchestrator.checkpoint.store import CheckpointStore, StartCheckpoint
from orchestrator.storage.folder import RemoteFolder, retried
from orchestrator.train.remote.checkpoints import (
    CHECKPOINTS,
    RemoteCheckpoints,
    named_checkpoint,
)
from orchestrator.train.remote.node_folder import NodeDownloads
from orchestrator.train.remote.publish_requests import ABANDON, PUBLISH

_DOWNLOADED = "downloaded-"

Ask = Callable[[str, str, bytes, Callable[[], None]], None]
"""Sends the driver a request: what to do, with which checkpoint, the manifest, and a call while it waits."""


class NodeStore(CheckpointStore):
    """Saves a worker's part of each checkpoint in a remote folder, and reads checkpoints from there."""

    def __init__(
        self,
        folder: Path,
        remote: RemoteFolder,
        node_folder: Path,
        ask: Ask,
        start: StartCheckpoint | None = None,
    ) -> None:
        """``folder`` is in this worker's own run folder; ``node_folder`` is for all workers of this node.

        ``start`` is the checkpoint of another run that this one began with."""
        super().__init__(folder, repair=False, start=start)
        self._ask = ask
        self._checkpoints = RemoteCheckpoints(remote / CHECKPOINTS)
        # Its name tells the paths that the main host lists from those that a user has named.
        downloaded = node_folder / f"{_DOWNLOADED}{node_folder.name}"
        self._downloads = NodeDownloads(downloaded, self._checkpoints)

    # Saving

    def part_folder(self, name: str) -> Path:
        folder = self.folder / name
        self.remove_remains(folder)
        self.remove_copies()
        with suppress(OSError):  # a full disk shows again when the files are written
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def store_part(self, folder: Path, on_piece: Callable[[], None]) -> None:
        name = _remote_name(folder)
        for file in sorted(folder.iterdir()):
            retried(lambda file=file: self._checkpoints.upload_part(name, file, on_piece), on_piece)
        shutil.rmtree(folder, ignore_errors=True)

    def publish(
        self,
        unfinished: Path,
        step: int,
        files: Mapping[str, Hashes],
        on_wait: Callable[[], None] = no_progress,
    ) -> Path:
        """Let the driver publish a checkpoint whose files all hosts have uploaded."""
        name = _remote_name(unfinished)
        self._ask(PUBLISH, name, manifest_bytes(step, files), on_wait)
        return self.folder / name

    def retain(self, best_step: int | None) -> None:
        """The driver retains checkpoints, after each that it publishes."""

    def remove_remains(self, unfinished: Path | None = None) -> None:
        """Remove what failed saves have left on this disk, except a save in progress."""
        for path in self.folder.glob(".writing_*"):
            if path != unfinished:
                shutil.rmtree(path, ignore_errors=True)

    # Reading

    def newest_first(self) -> list[tuple[int, Path]]:
        published = retried(self._checkpoints.newest_first)
        return [(checkpoint.step, self._downloads.path_of(checkpoint)) for checkpoint in published]

    def fetch_named(self, name: str) -> Path:
        """Download a checkpoint by the name of its remote folder. Raises ``CheckpointDamaged``."""
        checkpoint = named_checkpoint(name)
        assert checkpoint is not None, name
        with self._downloads.reading(checkpoint) as path:
            return path

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """Yield a checkpoint on this node, downloaded once. Raises ``CheckpointDamaged``."""
        checkpoint = named_checkpoint(path.parent.name)
        if checkpoint is None or path.parent.parent.name != self._downloads.folder.name:
            with super().reading(path) as found:  # not of this run
                yield found
            return
        with self._downloads.reading(checkpoint) as downloaded:
            yield downloaded

    def remove_copies(self) -> None:
        super().remove_copies()
        self._downloads.remove_unread()

    def set_aside_after(self, step: int, on_wait: Callable[[], None] = no_progress) -> None:
        """Let the driver unpublish the checkpoints later than ``step``, which the run resumes from."""
        published = retried(self._checkpoints.newest_first, on_wait)
        if any(checkpoint.step > step for checkpoint in published):
            self._ask(ABANDON, f"{step}-{secrets.token_hex(4)}", b"", on_wait)


def published_steps(url: str) -> list[int]:
    """Return the steps of the checkpoints of a run in a remote folder. Raises ``RemoteError``."""
    checkpoints = RemoteCheckpoints(RemoteFolder(url) / CHECKPOINTS)
    return [checkpoint.step for checkpoint in retried(checkpoints.newest_first)]


def _remote_name(folder: Path) -> str:
    """Return the name of the remote folder of a save, with the number of its local one."""
    step, _, number = folder.name.removeprefix(".writing_").rpartition("_")
    return f"{step}.{number}"
