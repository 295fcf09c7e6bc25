"""Checkpoints on disk: safetensors and JSON under a manifest of hashes, published by one rename.

    checkpoints/step_00000040/
        model.safetensors       parameters and buffers, by name and global expert id
        optimizer.safetensors   optimizer state, under the same names
        state.json              step, position in the data, best result, loss scale, random states
        manifest.json           the name, size and sha256 of each of the above

A folder of that name is complete: it was written under another name, synced and renamed. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from orchestrator.errors import CheckpointDamaged, UserError

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,18})")
_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_REPLACED = ".replaced_"
_LONGEST_MANIFEST, _LONGEST_STATE = 2**24, 2**28


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: tensors by file stem, and plain values."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 3, mend: bool = True) -> None:
        """``mend`` puts right what a killed save left; one worker's to do."""
        self.folder, self.keep, self._anchored = folder, keep, False
        if mend:
            with suppress(OSError):  # they are found under the names they have, too
                self._mend()

    def _mend(self) -> None:
        """A save over a step was killed between its two renames: the older one takes its place again. One killed later: it goes."""
        for path in self.folder.glob(f"{_REPLACED}step_*"):
            final = self.folder / path.name.removeprefix(_REPLACED)
            if not final.exists():
                os.rename(path, final)
            else:
                _sync(self.folder)
                shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, contents: Contents) -> Path:
        """Write a checkpoint. When this returns, it survives the loss of the process and of power."""
        self._make_folder()
        beside = self.folder / f".writing_{_named(step)}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            _write_whole(beside, step, contents)
            return self._publish(beside, step)
        except Exception:  # a full disk, for one: half a checkpoint must not keep it full
            shutil.rmtree(beside, ignore_errors=True)
            raise

    def _make_folder(self) -> None:
        """The folders above may be new too, and a folder whose name was not synced can be lost with all that is in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for above in () if self._anchored else self.folder.resolve().parents:
            with suppress(OSError):  # not ours, as a rule, and there for long
                _sync(above)
        self._anchored = True

    def _publish(self, beside: Path, step: int) -> Path:
        """Give a written checkpoint its name. Where the same step was saved before a restart, that one makes room, and is there under
        one name or the other until the new one is safe."""
        final, replaced = self.folder / _named(step), self.folder / f"{_REPLACED}{_named(step)}"
        over = final.exists()
        if over:
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        try:
            os.rename(beside, final)
        except OSError:
            if over:
                os.rename(replaced, final)
            raise
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def retain(self, best: int | None) -> None:
        """Drop all but the newest few and the best one, and what a killed save or removal left behind. What cannot be removed now is
        when the next one is saved."""
        found = self.newest_first()
        kept = {*(step for step, _ in found[: self.keep]), best}
        with suppress(OSError):
            self._clear()
            self._remove([path for step, path in found if step not in kept])

    def _remove(self, paths: list[Path]) -> None:
        """Out of sight first, each in one step, then away: a kill in between leaves no half a checkpoint under a good name. The names
        are synced before: a loss of power could bring them back, and not all that they held."""
        for path in paths:
            os.rename(path, path.with_name(f".removing_{path.name.removeprefix(_REPLACED)}"))
        if paths:
            _sync(self.folder)
            self._clear()

    def _clear(self) -> None:
        standing = {path for _, path in self.newest_first()}
        for path in self.folder.glob(".*_step_*"):
            if path not in standing:
                shutil.rmtree(path, ignore_errors=True)

    def abandon_after(self, step: int) -> None:
        """The run goes on from ``step``: later checkpoints are of a past that is no longer its own, or damaged. They are
        renamed out of the way, so that none of them outlives or outranks what is saved from now on."""
        later = [(of, path) for of, path in self.newest_first() if of > step]
        for of, path in later:
            aside = self.folder / f"abandoned_{_named(of)}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
        if later:
            _sync(self.folder)

    def newest_first(self) -> list[tuple[int, Path]]:
        """Steps and their folders. One that made room for another which never came stands for its step."""
        names = (
            {path.name for path in self.folder.iterdir() if path.is_dir()}
            if self.folder.is_dir()
            else set[str]()
        )
        whole = [name for name in names if name.startswith("step_")]
        whole += [
            name for name in names if name.startswith(_REPLACED) and name.removeprefix(_REPLACED) not in names
        ]
        steps = {name: _step_of(name.removeprefix(_REPLACED)) for name in whole}
        return sorted(
            ((step, self.folder / name) for name, step in steps.items() if step is not None), reverse=True
        )

    def newest_good(self) -> tuple[tuple[Path, Contents] | None, list[Skipped]]:
        """The newest checkpoint whose every byte is as it was written, and the newer ones that were not."""
        skipped: list[Skipped] = []
        for _, path in self.newest_first():
            try:
                return (path, load(path)), skipped
            except CheckpointDamaged as error:
                skipped.append(Skipped(path, str(error)))
        return None, skipped


def _named(step: int) -> str:
    return f"step_{step:08d}"


def _step_of(name: str) -> int | None:
    """The step that a folder's name says; None where we would not write it so."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and _named(int(match[1])) == name else None


def _write_whole(folder: Path, step: int, contents: Contents) -> None:
    folder.mkdir()
    for stem, tensors in contents.tensors.items():
        save_file(dict(tensors), folder / f"{stem}.safetensors")
    _write_json(folder / "state.json", dict(contents.state))
    files = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": files})
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def load(path: Path, without: Set[str] = frozenset()) -> Contents:
    """Verify a checkpoint and read it, but for the tensors ``without`` which the reader can do, by their names in the model.
    Raises CheckpointDamaged with the first thing that is wrong."""
    files = verify(path)
    try:
        tensors = {
            name.removesuffix(".safetensors"): _read(path / name, without)
            for name in files
            if name.endswith(".safetensors")
        }
        with _opened(path / "state.json") as file:
            state = json.loads(file.read(_LONGEST_STATE))
        if not isinstance(state, dict):
            raise ValueError(f"state.json holds a {type(state).__name__}")
    except (SafetensorError, ValueError, OSError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"{path.name}: cannot be read: {error}") from None
    return Contents(tensors, state)


def _read(path: Path, without: Set[str]) -> dict[str, Tensor]:
    """A file's tensors. An optimizer's have their slot before their name."""
    if not without:
        return load_file(path)
    with safe_open(path, framework="pt") as file:
        names = file.keys()  # a safetensors handle is not iterable itself
        return {name: file.get_tensor(name) for name in names if not {name, name.partition("/")[2]} & without}


def verify(path: Path) -> list[str]:
    """Check every file against the manifest, and the manifest against itself. Returns the names of the files."""
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}")
    manifest = _read_manifest(path)
    found = {p.name for p in path.iterdir()} - {MANIFEST}
    if found != set(manifest["files"]):
        missing, extra = set(manifest["files"]) - found, found - set(manifest["files"])
        raise CheckpointDamaged(
            f"{path.name}: missing {sorted(missing) or 'nothing'}, not of it {sorted(extra) or 'nothing'}"
        )
    for name, expected in manifest["files"].items():
        try:
            actual = _describe(path / name, expected["bytes"])
        except OSError as error:
            raise CheckpointDamaged(
                f"{path.name}: {name} cannot be read: {error.strerror or error}"
            ) from None
        if actual != expected:
            what = "size" if actual["bytes"] != expected["bytes"] else "sha256"
            raise CheckpointDamaged(
                f"{path.name}: {name} has {what} {actual[_KEY[what]]}, the manifest says {expected[_KEY[what]]}"
            )
    return sorted(manifest["files"])


_KEY = {"size": "bytes", "sha256": "sha256"}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with _opened(path / MANIFEST) as file:
            data = file.read(_LONGEST_MANIFEST)
        manifest = json.loads(data)
        names = manifest["files"]
        sound = all(
            _MEMBER.fullmatch(name) and set(entry) == {"bytes", "sha256"} for name, entry in names.items()
        )
        said, step = manifest["format"], manifest["step"]
        # only what we would write ourselves, byte for byte, is ours: a flipped bit anywhere in the manifest shows
        sound = sound and data == _json_bytes(manifest) and manifest.get("digest") == _digest(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path.name}: no readable {MANIFEST} ({type(error).__name__})") from None
    match = _NAME.fullmatch(path.name)
    if not sound:
        raise CheckpointDamaged(f"{path.name}: {MANIFEST} is not as it was written")
    if said != FORMAT:
        raise CheckpointDamaged(f"{path.name}: format {said}; this version reads format {FORMAT}")
    if match and int(match[1]) != step:
        raise CheckpointDamaged(f"{path.name}: the manifest is of step {step}")
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_json_bytes({k: v for k, v in content.items() if k != "digest"})).hexdigest()


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    if path.name == MANIFEST:
        content = content | {"digest": _digest(content)}
    path.write_bytes(_json_bytes(content))


def _describe(path: Path, expected: int | None = None) -> dict[str, Any]:
    """Size and hash of a file; of one that has not the ``expected`` size its size alone."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        whole = expected is None or size == expected
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest() if whole else ""}


def _opened(path: Path) -> BufferedReader:
    """A file of a checkpoint. Links lead elsewhere, and a pipe or a device has no end: neither is one."""
    if path.is_symlink():
        raise OSError("it is a link")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
