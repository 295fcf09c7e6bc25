"""The checkpoints of a run: published by one rename, retained, repaired after a crash, found again.

A folder named ``step_...`` is complete: its files were written under another name and synced, then
the main host wrote the manifest and renamed the folder. Other hosts write files and nothing else.
Other names:

    .writing_step_..._…  being written by the hosts, or left by a killed save
    .replaced_step_...   an older checkpoint of a step that is being saved again
    .removing_step_...   being removed
    abandoned_step_...   later than the step that the run resumed from"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from orchestrator.checkpoint.files import (
    KINDS,
    Contents,
    load,
    step_name,
    step_of,
    write_manifest,
)
from orchestrator.checkpoint.hashed_file import Hashes, no_progress
from orchestrator.errors import CheckpointDamaged
from orchestrator.storage.local_files import sync

_REPLACED = ".replaced_"


class LoadedCheckpoint(NamedTuple):
    """A checkpoint; every byte that was read of it is as written."""

    path: Path
    contents: Contents


@dataclass(frozen=True)
class Skipped:
    """A damaged checkpoint that was passed over, and its first defect."""

    path: Path
    reason: str


class StartCheckpoint(Protocol):
    """A checkpoint of another run that the nodes have copies of."""

    def holds(self, path: Path) -> bool:
        """Whether a path, of any worker, is that of the checkpoint."""
        ...

    def reading(self) -> AbstractContextManager[Path]:
        """Return where this node can read it, in a block."""
        ...

    def remove_unread(self) -> None:
        """Remove the copy of this node, unless a process reads it."""
        ...


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self, folder: Path, keep: int = 3, repair: bool = True, start: StartCheckpoint | None = None
    ) -> None:
        """``repair`` cleans up after a killed save; only one worker may do it.

        ``start`` is the checkpoint of another run that this one began with."""
        self.folder = folder
        self._start = start
        self.keep = keep
        self._parents_synced = False
        if repair:
            # On a read-only disk they stay as they are: ``newest_first`` finds them under either
            # name.
            with suppress(OSError):
                self._repair()

    def _repair(self) -> None:
        """Complete saves over an existing step that were killed.

        Killed between the two renames, the older checkpoint gets its name back. Killed later, it
        is removed."""
        for path in self.folder.glob(f"{_REPLACED}step_*"):
            final = self.folder / path.name.removeprefix(_REPLACED)
            if not final.exists():
                os.rename(path, final)
            else:
                sync(self.folder)
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """Create the folder that the hosts write the files of a checkpoint into.

        Its name is used once: a host that still writes an earlier save of the step, of a group that
        was left, cannot reach it. Of two saves of a step, the later has the higher number."""
        self._make_folder()
        microseconds = time.time_ns() // 1000
        folder = self.folder / f".writing_{step_name(step)}_{microseconds}"
        folder.mkdir()
        return folder

    def part_folder(self, name: str) -> Path:
        """Return the folder that this host writes its files into; ``name`` is that of ``begin``'s."""
        self.remove_copies()
        return self.folder / name

    def remove_copies(self) -> None:
        """Remove this node's copies of the checkpoint that the run began with: all workers have loaded it."""
        if self._start is not None:
            self._start.remove_unread()

    def store_part(self, folder: Path, on_piece: Callable[[], None]) -> None:
        """Bring this host's files to the place where all nodes find them: here they are written there."""

    def reading(self, path: Path) -> AbstractContextManager[Path]:
        """Return where this node can read a checkpoint that the main host has listed, in a block."""
        if self._start is not None and self._start.holds(path):
            return self._start.reading()
        return nullcontext(path)

    def fetch_named(self, name: str) -> Path:
        """Return where this node can read the checkpoint in the folder with this name."""
        return self.folder / name

    def discard(self, unfinished: Path) -> None:
        """Remove the folder of a save that failed: half a checkpoint must not keep a disk full."""
        shutil.rmtree(unfinished, ignore_errors=True)

    def _make_folder(self) -> None:
        """Create the folder, and sync the names of all folders above it.

        They may be new too, and a folder whose name was not synced can be lost with everything
        in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._parents_synced:
            return
        for parent in self.folder.resolve().parents:
            # Most of them belong to others and have existed for long.
            with suppress(OSError):
                sync(parent)
        self._parents_synced = True

    def publish(
        self,
        unfinished: Path,
        step: int,
        files: Mapping[str, Hashes],
        on_wait: Callable[[], None] = no_progress,  # noqa: ARG002
    ) -> Path:
        """Write the manifest of files that are all on disk, and give the folder its final name.

        When this returns, the checkpoint survives the loss of the process and of power. A
        restarted run may save a step again. The older checkpoint is renamed first, and removed
        only when the new one is safe: at any time one of the two is there."""
        write_manifest(unfinished, step, files)
        final = self.folder / step_name(step)
        replaced = self.folder / f"{_REPLACED}{step_name(step)}"
        replaces = final.exists()
        if replaces:
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        try:
            os.rename(unfinished, final)
        except OSError:
            if replaces:
                os.rename(replaced, final)
            raise
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def retain(self, best_step: int | None) -> None:
        """Remove all but the newest few and the best one, and the remains of killed saves.

        What cannot be removed now is tried again after the next save."""
        with suppress(OSError):
            checkpoints = self.newest_first()
            retained = {*(step for step, _ in checkpoints[: self.keep]), best_step}
            self.remove_remains()
            self._remove([path for step, path in checkpoints if step not in retained])

    def _remove(self, paths: list[Path]) -> None:
        """Remove checkpoints.

        Each is renamed first: a kill in between leaves no half checkpoint under a good name. The
        renames are synced before any file goes: else a loss of power could restore a name
        without its files."""
        for path in paths:
            os.rename(path, path.with_name(f".removing_{path.name.removeprefix(_REPLACED)}"))
        if paths:
            sync(self.folder)
            self.remove_remains()

    def remove_remains(self, unfinished: Path | None = None) -> None:
        """Remove what killed saves and removals have left, except a save in progress."""
        retained = {unfinished, *(path for _, path in self.newest_first())}
        for path in self.folder.glob(".*_step_*"):
            if path not in retained:
                shutil.rmtree(path, ignore_errors=True)

    def set_aside_after(
        self,
        step: int,
        on_wait: Callable[[], None] = no_progress,  # noqa: ARG002
    ) -> None:
        """Rename the checkpoints later than ``step``, which the run resumes from.

        They are damaged, or of steps that the run will do again: none may outlive or outrank the
        new ones."""
        later = [(other, path) for other, path in self.newest_first() if other > step]
        for other, path in later:
            abandoned = self.folder / f"abandoned_{step_name(other)}"
            shutil.rmtree(abandoned, ignore_errors=True)
            os.rename(path, abandoned)
        if later:
            sync(self.folder)

    def newest_first(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of all complete checkpoints.

        A replaced checkpoint counts as long as its successor does not exist."""
        if not self.folder.is_dir():
            return []
        names = {path.name for path in self.folder.iterdir() if path.is_dir()}
        checkpoints = []
        for name in names:
            final_name = name.removeprefix(_REPLACED)
            if name != final_name and final_name in names:
                continue
            step = step_of(final_name)
            if step is not None:
                checkpoints.append((step, self.folder / name))
        return sorted(checkpoints, reverse=True)

    def newest_good(self, kinds: Set[str] = KINDS) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
        """Return the newest good checkpoint with its tensors of ``kinds``, and the damaged newer ones."""
        paths = [path for _, path in self.newest_first()]
        return first_good(paths, lambda path: load(path, kinds=kinds))


def first_good(
    paths: Sequence[Path], load_one: Callable[[Path], Contents]
) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
    """Return the first of the checkpoints that is good, and the damaged ones before it."""
    skipped: list[Skipped] = []
    for path in paths:
        try:
            return LoadedCheckpoint(path, load_one(path)), skipped
        except CheckpointDamaged as error:
            skipped.append(Skipped(path, str(error)))
    return None, skipped
