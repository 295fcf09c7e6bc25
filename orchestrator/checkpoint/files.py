"""The files of one checkpoint: safetensors and JSON under a manifest of hashes.

Each host writes files of its own, which end with its rank. Nothing is ever unpickled.

step_00000040/
    model_00000.safetensors       parameters and buffers, by name and global expert id
    optimizer_00000.safetensors   optimizer state, under the same names
    values_00001.json             optimizer state that is not a tensor, of the experts of host 1
    state.json                    step, position in the data, best result, loss scale, random states
    manifest.json                 the name of each of the above, and the sha256 of each piece of it"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from orchestrator.checkpoint.hashed_file import (
    PIECE_BYTES,
    HashedReader,
    Hashes,
    no_progress,
    write_hashed,
)
from orchestrator.checkpoint.tensor_file import read_tensors, write_tensors
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.storage.local_files import open_regular, sync

FORMAT = 2
MANIFEST = "manifest.json"
KINDS = frozenset({"model", "optimizer"})
STATE = "state.json"
AVERAGE_SLOT = "ema"
"""The slot of the optimizer state that holds the average of a weight."""
_STEP_NAME = re.compile(r"step_(\d{8,18})")
_FILE_NAME = re.compile(r"(?:(model|optimizer)_\d{5}\.safetensors)|(?:values_\d{5}|state)\.json", re.ASCII)
MAX_MANIFEST_BYTES = 2**30
"""The hashes of about 95 TB of state. A longer manifest is that of no run: it is not read."""
MAX_STATE_BYTES = 2**28


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint: tensors by kind ("model", "optimizer") and key, and plain values.

    The key of an optimizer's tensor is ``slot/name``."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    shards: Mapping[str, Set[str]] = field(default_factory=dict)
    """The keys, by kind, of tensors with the rows of the reader's shard alone. Others are whole."""


@dataclass(frozen=True)
class HostPart:
    """The part of a checkpoint that one host writes."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors in host memory, by kind and key."""
    experts: Set[str] = frozenset()
    """The keys of the tensors that belong to experts."""
    values: Mapping[str, Any] | None = None
    """Optimizer state of the host's experts that is not a tensor; on the main host in ``state``."""
    state: Mapping[str, Any] | None = None
    """All state that is not a tensor; only on the main host."""


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint: a run may have a manifest of its own."""
    return (path / MANIFEST).exists() and not (path / "checkpoints").is_dir()


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, or None for a name that no run would write."""
    match = _STEP_NAME.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


# Writing


def write_part(
    folder: Path, rank: int, part: HostPart, on_piece: Callable[[], None] = no_progress
) -> dict[str, Hashes]:
    """Write the files of one host, and sync them and their names. Return their hashes by name."""
    files: dict[str, Hashes] = {}
    for kind, tensors in part.tensors.items():
        if tensors:
            name = f"{kind}_{rank:05d}.safetensors"
            files[name] = write_tensors(folder / name, tensors, part.experts, on_piece)
    if part.values:
        name = f"values_{rank:05d}.json"
        files[name] = _write_json(folder / name, part.values)
    if part.state is not None:
        files[STATE] = _write_json(folder / STATE, part.state)
    # The folder last: its names must not survive a loss of power without their bytes.
    sync(folder)
    return files


def write_manifest(folder: Path, step: int, files: Mapping[str, Hashes]) -> None:
    """Write and sync the manifest of a checkpoint whose files are all safe."""
    _write_bytes(folder / MANIFEST, manifest_bytes(step, files))
    sync(folder)


def manifest_bytes(step: int, files: Mapping[str, Hashes]) -> bytes:
    """Return the content of a checkpoint's manifest."""
    entries = {name: hashes.to_json() for name, hashes in files.items()}
    manifest = {"format": FORMAT, "step": step, "files": entries}
    content = _json_bytes(manifest | {"digest": _digest(manifest)})
    _check_readable(MANIFEST, len(content), MAX_MANIFEST_BYTES)
    return content


def _check_readable(name: str, num_bytes: int, max_bytes: int) -> None:
    """Raise UserError for a file that no reader would take: better now than when the run is resumed."""
    if num_bytes > max_bytes:
        raise UserError(
            f"the checkpoint would have a {name} of {num_bytes:,} bytes, and at most {max_bytes:,} are read "
            "again; train fewer parameters, or choose an --optimizer with less state"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> Hashes:
    data = _json_bytes(content)
    _check_readable(path.name, len(data), MAX_STATE_BYTES)
    return _write_bytes(path, data)


def _write_bytes(path: Path, content: bytes) -> Hashes:
    data = memoryview(content)
    pieces = (data[begin : begin + PIECE_BYTES] for begin in range(0, len(data), PIECE_BYTES))
    return write_hashed(path, pieces)


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own digest."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(_json_bytes(content)).hexdigest()


# Reading


def load(
    path: Path,
    without: Set[str] = frozenset(),
    kinds: Set[str] = KINDS,
    on_piece: Callable[[], None] = no_progress,
) -> Contents:
    """Read a checkpoint, whichever hosts wrote it, and verify all that is read.

    Tensors of parameters named in ``without`` and of other ``kinds``, which the reader does not
    need, are neither read nor verified. Raises ``CheckpointDamaged`` with the first defect."""
    files = listed_files(path)
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    try:
        for name, kind in tensor_files(files):
            if kind not in kinds:
                continue
            loaded = read_tensors(path / name, files[name], _is_needed(kind, without), on_piece)
            twice = sorted(loaded.keys() & tensors[kind].keys())
            if twice:
                raise ValueError(f"{twice[0]!r} is in two files")
            tensors[kind] |= loaded
        state = _read_state(path, files)
    # A message of an error with the content of a hostile file may be long.
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path.name}: cannot be read: {str(error)[:200]}") from None
    return Contents(tensors, state)


def verify(path: Path) -> None:
    """Read every byte of a checkpoint. Raises ``CheckpointDamaged`` with the first defect."""
    for name, hashes in listed_files(path).items():
        with HashedReader(path / name, hashes) as reader:
            reader.verify()


def tensor_files(files: Mapping[str, Hashes]) -> Iterator[tuple[str, str]]:
    """Yield the name and the kind of each file of tensors, in the order of ranks."""
    for name in sorted(files):
        match = _FILE_NAME.fullmatch(name)
        if match is not None and match[1] is not None:
            yield name, match[1]


def _is_needed(kind: str, without: Set[str]) -> Callable[[str], bool]:
    if kind == "model":
        return lambda key: key not in without
    return lambda key: key.partition("/")[2] not in without


def _read_state(path: Path, files: Mapping[str, Hashes]) -> dict[str, Any]:
    """Return all state that is not a tensor: the main host's, with the values of all hosts."""
    state = _read_json(path / STATE, files[STATE])
    for name in sorted(files):
        if name.startswith("values_"):
            state["optimizer"]["values"] |= _read_json(path / name, files[name])
    return state


def _read_json(path: Path, hashes: Hashes) -> dict[str, Any]:
    if hashes.num_bytes > MAX_STATE_BYTES:
        raise ValueError(f"{path.name} has {hashes.num_bytes} bytes")
    with HashedReader(path, hashes) as reader:
        content = json.loads(reader.read_bytes(0, hashes.num_bytes))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}")
    return content


def listed_files(path: Path) -> dict[str, Hashes]:
    """Return the files of a checkpoint and their hashes. They are exactly those in the folder."""
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}")
    listed = read_manifest(path)
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    if present != set(listed):
        missing = sorted(set(listed) - present) or "nothing"
        extra = sorted(present - set(listed)) or "nothing"
        raise CheckpointDamaged(f"{path.name}: missing {missing}, not part of it {extra}")
    return listed


def read_manifest(path: Path) -> dict[str, Hashes]:
    """Return the hashes of each file in the manifest, which is checked against itself."""
    try:
        with os.fdopen(open_regular(path / MANIFEST), "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES)
    except OSError as error:
        reason = type(error).__name__
        raise CheckpointDamaged(f"{path.name}: no readable {MANIFEST} ({reason})") from None
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path) -> dict[str, Hashes]:
    """Return the hashes of each file in a manifest; ``path`` is the folder of the checkpoint."""
    try:
        manifest = json.loads(data)
        # The bytes must be those that we would write, so that a flipped bit anywhere in the
        # manifest shows.
        is_intact = data == _json_bytes(manifest) and manifest["digest"] == _digest(manifest)
        format_number = manifest["format"]
        step = manifest["step"]
        entries = manifest["files"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = type(error).__name__
        raise CheckpointDamaged(f"{path.name}: no readable {MANIFEST} ({reason})") from None
    if not is_intact:
        raise CheckpointDamaged(f"{path.name}: {MANIFEST} is not as it was written")
    if format_number != FORMAT:
        # Not damage: a reader would pass over the checkpoints of the other version, and the run begin anew.
        raise UserError(
            f"{path} has checkpoint format {str(format_number)[:20]}, of another version of this program; "
            f"this version reads format {FORMAT}. Continue with the version that wrote it, or start a new run"
        )
    # A checkpoint that was copied elsewhere may have any name; under the name of a step it must be of
    # that step.
    match = _STEP_NAME.fullmatch(path.name)
    if match and int(match[1]) != step:
        raise CheckpointDamaged(f"{path.name}: the manifest is of step {str(step)[:20]}")
    return _read_entries(path, entries)


def _read_entries(path: Path, entries: Any) -> dict[str, Hashes]:
    try:
        files = {name: Hashes.from_json(hashes) for name, hashes in entries.items()}
        if STATE in files and all(_FILE_NAME.fullmatch(name) for name in files):
            return files
    except (ValueError, TypeError, AttributeError):
        pass
    raise CheckpointDamaged(f"{path.name}: {MANIFEST} is not as it was written")
