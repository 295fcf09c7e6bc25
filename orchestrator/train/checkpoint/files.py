"""The files of one checkpoint: safetensors and JSON under a manifest of hashes.

Nothing is ever unpickled.

step_00000040/
    model.safetensors       parameters and buffers, by name and global expert id
    optimizer.safetensors   optimizer state, under the same names
    state.json              step, position in the data, best result, loss scale, random states
    manifest.json           the name, size and sha256 of each of the above"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Set
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
_STATE = "state.json"
_TENSORS_SUFFIX = ".safetensors"
_STEP_NAME = re.compile(r"step_(\d{8,18})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_MANIFEST_BYTES = 2**24
_MAX_STATE_BYTES = 2**28


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint: tensors by file stem and name, and plain values."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, or None for a name that no run would write."""
    match = _STEP_NAME.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def write_checkpoint(folder: Path, step: int, contents: Contents) -> None:
    """Write a checkpoint into a new folder, and sync every file of it."""
    folder.mkdir()
    for stem, tensors in contents.tensors.items():
        save_file(dict(tensors), folder / f"{stem}{_TENSORS_SUFFIX}")
    _write_json(folder / _STATE, dict(contents.state))
    # Hashed as read back from the file system, not as it was in memory.
    files = {path.name: _size_and_hash(path) for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": files}
    _write_json(folder / MANIFEST, manifest | {"digest": _digest(manifest)})
    # The folder last: its names must not survive a loss of power without their bytes.
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def load(path: Path, without: Set[str] = frozenset()) -> Contents:
    """Verify and read a checkpoint.

    Tensors named in ``without``, which the reader does not need, are left out. Raises
    ``CheckpointDamaged`` with the first defect."""
    files = verify(path)
    try:
        tensors = {
            name.removesuffix(_TENSORS_SUFFIX): _read_tensors(path / name, without)
            for name in files
            if name.endswith(_TENSORS_SUFFIX)
        }
        with _open_regular(path / _STATE) as file:
            state = json.loads(file.read(_MAX_STATE_BYTES))
        if not isinstance(state, dict):
            raise ValueError(f"{_STATE} holds a {type(state).__name__}")
    except (SafetensorError, ValueError, OSError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"{path.name}: cannot be read: {error}") from None
    return Contents(tensors, state)


def _read_tensors(path: Path, without: Set[str]) -> dict[str, Tensor]:
    if not without:
        return load_file(path)
    with safe_open(path, framework="pt") as file:
        names = file.keys()  # a safetensors handle is not iterable itself
        # The name of an optimizer's tensor is ``slot/name``.
        needed = [name for name in names if not {name, name.partition("/")[2]} & without]
        return {name: file.get_tensor(name) for name in needed}


def verify(path: Path) -> list[str]:
    """Check every file against the manifest, and the manifest against itself.

    Return the names of the files."""
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}")
    listed = _read_manifest(path)["files"]
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    if present != set(listed):
        missing = sorted(set(listed) - present) or "nothing"
        extra = sorted(present - set(listed)) or "nothing"
        raise CheckpointDamaged(f"{path.name}: missing {missing}, not part of it {extra}")
    for name, expected in listed.items():
        try:
            actual = _size_and_hash(path / name, expected["bytes"])
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointDamaged(f"{path.name}: {name} cannot be read: {reason}") from None
        for key, label in (("bytes", "size"), ("sha256", "sha256")):
            if actual[key] != expected[key]:
                raise CheckpointDamaged(
                    f"{path.name}: {name} has {label} {actual[key]}, the manifest says {expected[key]}"
                )
    return sorted(listed)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with _open_regular(path / MANIFEST) as file:
            data = file.read(_MAX_MANIFEST_BYTES)
        manifest = json.loads(data)
        format_number = manifest["format"]
        step = manifest["step"]
        is_intact = all(
            _FILE_NAME.fullmatch(name) and set(entry) == {"bytes", "sha256"}
            for name, entry in manifest["files"].items()
        )
        # The bytes must be those that we would write, so that a flipped bit anywhere in the
        # manifest shows.
        is_intact = (
            is_intact and data == _json_bytes(manifest) and manifest.get("digest") == _digest(manifest)
        )
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = type(error).__name__
        raise CheckpointDamaged(f"{path.name}: no readable {MANIFEST} ({reason})") from None
    if not is_intact:
        raise CheckpointDamaged(f"{path.name}: {MANIFEST} is not as it was written")
    if format_number != FORMAT:
        raise CheckpointDamaged(f"{path.name}: format {format_number}; this version reads format {FORMAT}")
    # A checkpoint that was copied elsewhere may have any name; under a step's name it must be of
    # it.
    match = _STEP_NAME.fullmatch(path.name)
    if match and int(match[1]) != step:
        raise CheckpointDamaged(f"{path.name}: the manifest is of step {step}")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own digest."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(_json_bytes(content)).hexdigest()


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(_json_bytes(content))


def _size_and_hash(path: Path, expected_bytes: int | None = None) -> dict[str, Any]:
    """Return the size and the hash of a file.

    A file of another size than expected is not hashed."""
    with _open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        has_expected_size = expected_bytes is None or num_bytes == expected_bytes
        sha256 = hashlib.file_digest(file, "sha256").hexdigest() if has_expected_size else ""
        return {"bytes": num_bytes, "sha256": sha256}


def _open_regular(path: Path) -> BufferedReader:
    """Open a file of a checkpoint.

    A link leads elsewhere and a pipe or device has no end: both are refused."""
    if path.is_symlink():
        raise OSError("it is a link")
    # NOFOLLOW: the file may become a link meanwhile. NONBLOCK: to open a pipe would wait for a
    # writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def sync(path: Path) -> None:
    """Force a file's data, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
