"""The checkpoints of a run in a remote folder: published by their manifest, retained, downloaded.

An object store has no rename. So a checkpoint is there once its manifest is: the manifest is written
after all other files, and removed before any of them. A folder without a manifest is the remains of
a killed upload or removal.

    checkpoints/step_00000040/      the files of a checkpoint, as on disk
    checkpoints/step_00000040.1/    another upload of the same step: no file of a checkpoint that is
                                    published or abandoned is ever overwritten

Where the nodes share no disk, each host uploads its own files (``upload_part``), into a folder with a
number that no other save has (the time), and the driver publishes them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.checkpoint.files import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    STATE,
    load,
    parse_manifest,
    read_manifest,
    step_name,
    step_of,
    verify,
)
from orchestrator.checkpoint.hashed_file import no_progress
from orchestrator.checkpoint.progress import read_progress
from orchestrator.errors import CheckpointDamaged
from orchestrator.storage.folder import RemoteError, RemoteFolder

CHECKPOINTS = "checkpoints"
_ABANDONED = "abandoned.json"
"""The manifest of a checkpoint that is damaged, or later than the step that the run resumed from."""
_FOLDER_NAME = re.compile(r"(step_\d{8,18})(?:\.(\d{1,18}))?", re.ASCII)


class RemoteCheckpoint(NamedTuple):
    """A published checkpoint: its step, the number of its upload, and the name of its folder."""

    step: int
    upload: int
    name: str


class RemoteCheckpoints:
    """The checkpoints of one run. One process writes them."""

    def __init__(self, folder: RemoteFolder) -> None:
        """``folder`` is the folder ``checkpoints`` of the run."""
        self._folder = folder

    def newest_first(self) -> list[RemoteCheckpoint]:
        return _published(self._folder.files())

    def upload(self, path: Path, before_manifest: Callable[[], None]) -> int | None:
        """Upload a checkpoint of the disk, and publish it. Return its bytes; None if it is there already.

        ``before_manifest`` uploads files that must be there before the checkpoint is. Files that a failed
        upload has sent are sent again."""
        manifest = (path / MANIFEST).read_bytes()
        step = step_of(path.name)
        assert step is not None, path
        files = self._folder.files()
        earlier = [checkpoint for checkpoint in _published(files) if checkpoint.step == step]
        for checkpoint in earlier:
            if self._manifest(checkpoint) == manifest:
                return None
        name = _new_name(step, [*earlier, *_abandoned(files)])
        for file in sorted(path.iterdir()):
            if file.name != MANIFEST:
                self.upload_part(name, file)
        return self.publish(name, manifest, before_manifest)

    def upload_part(self, name: str, file: Path, on_part: Callable[[], None] = no_progress) -> None:
        """Upload a file of a checkpoint that is not published yet."""
        self._folder.upload(file, f"{name}/{file.name}", on_part)

    def publish(self, name: str, manifest: bytes, before_manifest: Callable[[], None]) -> int:
        """Publish a checkpoint whose files are uploaded. Return its bytes.

        Raises ``CheckpointDamaged`` if a file of the manifest is not there."""
        checkpoint = named_checkpoint(name)
        assert checkpoint is not None, name
        files = self._folder.files()
        listed = parse_manifest(manifest, Path(step_name(checkpoint.step)))
        for file, hashes in listed.items():
            if _size(files.get(f"{name}/{file}")) != hashes.num_bytes:
                raise CheckpointDamaged(f"{name}: {file} was not uploaded as a whole")
        before_manifest()
        self._folder.write(f"{name}/{MANIFEST}", manifest)
        for earlier in _published(files):
            if earlier.step == checkpoint.step and earlier.name != name:
                self._remove(earlier.name)
        return sum(hashes.num_bytes for hashes in listed.values()) + len(manifest)

    def best_step(self, name: str) -> int | None:
        """Return the best step so far, as a checkpoint has it that the run has uploaded."""
        state = self._folder.read(f"{name}/{STATE}", MAX_STATE_BYTES)
        return read_progress(json.loads(state or b"{}")).best_step

    def retain(self, keep: int, best_step: int | None) -> None:
        """Remove all but the newest few and the best one, and the remains of killed uploads.

        Files of the newest step and of later ones stay: hosts may be uploading them, or the same step
        again."""
        files = self._folder.files()
        published = _published(files)
        steps = sorted({checkpoint.step for checkpoint in published}, reverse=True)
        retained = {*steps[:keep], best_step}
        kept = {checkpoint.name for checkpoint in published if checkpoint.step in retained}
        # A checkpoint with both manifests, of a killed start, is published still.
        kept |= {checkpoint.name for checkpoint in _abandoned(files)} - {other.name for other in published}
        for name in _folders(files) - kept:
            checkpoint = named_checkpoint(name)
            if checkpoint is not None and checkpoint.step < max(steps, default=-1):
                self._remove(name)

    def abandon_after(self, step: int) -> None:
        """Unpublish the checkpoints later than ``step``, which the run resumes from. Their files stay."""
        for checkpoint in self.newest_first():
            if checkpoint.step > step:
                self._folder.write(f"{checkpoint.name}/{_ABANDONED}", self._manifest(checkpoint))
                self._folder.remove([f"{checkpoint.name}/{MANIFEST}"])

    def download(self, checkpoint: RemoteCheckpoint, folder: Path) -> Path:
        """Download a checkpoint into ``folder``, verify every byte, and return its path.

        Raises ``CheckpointDamaged``, and ``RemoteError`` if the storage does not answer."""
        partial = folder / f".writing_{step_name(checkpoint.step)}_download"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            (partial / MANIFEST).write_bytes(self._manifest(checkpoint))
            # The names in a manifest are those of a checkpoint's files, else it counts as damaged.
            for name in read_manifest(partial):
                self._download_file(checkpoint, name, partial)
            verify(partial)
            path = folder / step_name(checkpoint.step)
            os.rename(partial, path)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(str(error).replace(partial.name, checkpoint.name)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return path

    def _download_file(self, checkpoint: RemoteCheckpoint, name: str, folder: Path) -> None:
        try:
            self._folder.download(f"{checkpoint.name}/{name}", folder / name)
        except RemoteError as error:
            if self._folder.read(f"{checkpoint.name}/{name}", 1) is None:
                raise CheckpointDamaged(f"{checkpoint.name}: {name} is missing") from None
            raise error

    def _manifest(self, checkpoint: RemoteCheckpoint) -> bytes:
        """Return the manifest. Raises ``RemoteError`` if there is none: that is no sign of damage."""
        manifest = self._folder.read(f"{checkpoint.name}/{MANIFEST}", MAX_MANIFEST_BYTES)
        if manifest is None:
            raise RemoteError(
                f"cannot read {checkpoint.name}/{MANIFEST} of {self._folder.url}: it is not there; "
                "look for the checkpoint, and try again"
            )
        return manifest

    def _remove(self, name: str) -> None:
        # The manifest first: a kill in between leaves no half checkpoint that passes for a whole one.
        files = [file for file in self._folder.files() if file.startswith(f"{name}/")]
        self._folder.remove(sorted(files, key=lambda file: file != f"{name}/{MANIFEST}"))


def named_checkpoint(name: str) -> RemoteCheckpoint | None:
    """Return the checkpoint of a folder's name; None for a name that no upload has."""
    match = _FOLDER_NAME.fullmatch(name)
    step = step_of(match[1]) if match else None
    return RemoteCheckpoint(step, int(match[2] or 0), name) if match and step is not None else None


def best_step(path: Path) -> int | None:
    """Return the best step so far, as a checkpoint on the disk has it."""
    return read_progress(load(path, kinds=frozenset()).state).best_step


def _published(files: Iterable[str]) -> list[RemoteCheckpoint]:
    """Return the checkpoints with a manifest: the newest step first, of one step its last upload."""
    return _that_hold(MANIFEST, files)


def _abandoned(files: Iterable[str]) -> list[RemoteCheckpoint]:
    return _that_hold(_ABANDONED, files)


def _that_hold(wanted: str, files: Iterable[str]) -> list[RemoteCheckpoint]:
    found: list[RemoteCheckpoint] = []
    for file in files:
        folder, _, name = file.partition("/")
        checkpoint = named_checkpoint(folder)
        if checkpoint is not None and name == wanted:
            found.append(checkpoint)
    return sorted(found, reverse=True)


def _folders(files: Iterable[str]) -> set[str]:
    """Return the folders with the name of a checkpoint, published or not."""
    folders = {file.partition("/")[0] for file in files}
    return {folder for folder in folders if named_checkpoint(folder)}


def _size(version: str | None) -> int | None:
    """Return the size of an object that is there."""
    return int(version.partition(" ")[0]) if version is not None else None


def _new_name(step: int, taken: Sequence[RemoteCheckpoint]) -> str:
    """Return the name of a folder that no published or abandoned checkpoint has."""
    uploads = (checkpoint.upload for checkpoint in taken if checkpoint.step == step)
    last_upload = max(uploads, default=None)
    return step_name(step) if last_upload is None else f"{step_name(step)}.{last_upload + 1}"
