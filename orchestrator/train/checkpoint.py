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
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
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
        self.folder, self.keep = folder, keep
        for path in folder.glob(".replaced_step_*") if mend else ():  # a save over this step was killed between its two renames
            final = folder / path.name.removeprefix(".replaced_")
            if not final.exists():
                os.rename(path, final)

    def save(self, step: int, contents: Contents) -> Path:
        """Write a checkpoint. When this returns, it survives the loss of the process and of power."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final, beside = self.folder / f"step_{step:08d}", self.folder / f".writing_step_{step:08d}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            _write_whole(beside, step, contents)
        except Exception:  # a full disk, for one: half a checkpoint must not keep it full
            shutil.rmtree(beside, ignore_errors=True)
            raise
        replaced = self.folder / f".replaced_step_{step:08d}"
        if final.exists():  # the same step again, after a restart
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(beside, final)
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def retain(self, best: int | None) -> None:
        """Drop all but the newest few and the best one, and what a killed save or removal left behind."""
        steps = [step for step, _ in self.newest_first()]
        kept = {*steps[: self.keep], best}
        for step, path in self.newest_first():
            if step not in kept:
                _remove(path)
        for path in self.folder.glob(".*_step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def abandon_after(self, step: int) -> None:
        """The run goes on from ``step``: later checkpoints are of a past that is no longer its own, or damaged. They are
        renamed out of the way, so that none of them outlives or outranks what is saved from now on."""
        for later, path in self.newest_first():
            if later > step:
                aside = path.with_name(f"abandoned_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)

    def newest_first(self) -> list[tuple[int, Path]]:
        found = [(int(match[1]), path) for path in self._folders() if (match := _NAME.fullmatch(path.name))]
        return sorted(found, reverse=True)

    def _folders(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if path.is_dir())

    def newest_good(self) -> tuple[tuple[Path, Contents] | None, list[Skipped]]:
        """The newest checkpoint whose every byte is as it was written, and the newer ones that were not."""
        skipped: list[Skipped] = []
        for _, path in self.newest_first():
            try:
                return (path, load(path)), skipped
            except CheckpointDamaged as error:
                skipped.append(Skipped(path, str(error)))
        return None, skipped


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
        tensors = {name.removesuffix(".safetensors"): _read(path / name, without) for name in files if name.endswith(".safetensors")}
        state = json.loads((path / "state.json").read_bytes())
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
        return {key: file.get_tensor(key) for key in file.keys() if not {key, key.partition("/")[2]} & without}  # noqa: SIM118


def verify(path: Path) -> list[str]:
    """Check every file against the manifest, and the manifest against itself. Returns the names of the files."""
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}")
    manifest = _read_manifest(path)
    found = {p.name for p in path.iterdir()} - {MANIFEST}
    if found != set(manifest["files"]):
        missing, extra = set(manifest["files"]) - found, found - set(manifest["files"])
        raise CheckpointDamaged(f"{path.name}: missing {sorted(missing) or 'nothing'}, not of it {sorted(extra) or 'nothing'}")
    for name, expected in manifest["files"].items():
        try:
            actual = _describe(path / name, expected["bytes"])
        except OSError as error:
            raise CheckpointDamaged(f"{path.name}: {name} cannot be read: {error.strerror or error}") from None
        if actual != expected:
            what = "size" if actual["bytes"] != expected["bytes"] else "sha256"
            raise CheckpointDamaged(f"{path.name}: {name} has {what} {actual[_KEY[what]]}, the manifest says {expected[_KEY[what]]}")
    return sorted(manifest["files"])


_KEY = {"size": "bytes", "sha256": "sha256"}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        data = (path / MANIFEST).read_bytes()
        manifest = json.loads(data)
        names = manifest["files"]
        sound = all(_MEMBER.fullmatch(name) and set(entry) == {"bytes", "sha256"} for name, entry in names.items())
        said, step = manifest["format"], manifest["step"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path.name}: no readable {MANIFEST} ({type(error).__name__})") from None
    match = _NAME.fullmatch(path.name)
    # only what we would write ourselves, byte for byte, is ours: a flipped bit anywhere in the manifest shows
    if not sound or data != _json_bytes(manifest) or manifest.get("digest") != _digest(manifest):
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
    """Size and hash of a file; of one that has not the ``expected`` size its size alone. Links lead elsewhere, and a pipe or a device
    has no end: neither is a file of a checkpoint."""
    if path.is_symlink():
        raise OSError("it is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        size = status.st_size
        whole = expected is None or size == expected
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest() if whole else ""}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Out of sight first, in one step, then away: a kill in between leaves no half a checkpoint under a good name."""
    aside = path.with_name(f".removing_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)
