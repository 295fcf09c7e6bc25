"""Files on this machine: written as an object store does, whole or not at all, and read from run folders."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError

MAX_SMALL_BYTES = 2**26
"""Larger than any plan, summary or result of an evaluation that a run writes."""
_PARTIAL = ".partial-"
"""The beginning of the name of a file that is being written, or was when its writer was killed."""


def replace_file(target: Path, content: bytes) -> None:
    """Write a file, in place of an older one. When this returns, it survives a loss of power."""
    with _replacing(target) as partial:
        partial.write_bytes(content)


def write_whole(path: Path, data: str | bytes) -> Path:
    """Write a file of a run folder under a temporary name, and rename it: the old one stays until the new one
    is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON can carry lone surrogates, which UTF-8 cannot encode: they become question marks.
    content = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
    partial.unlink(missing_ok=True)
    try:
        # Mode "x" never writes through a link that someone placed under this name.
        with partial.open("xb") as file:
            file.write(content)
        os.replace(partial, path)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, but a file is written there; move it away") from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, in place of an older one. When this returns, it survives a loss of power."""
    with _replacing(target) as partial:
        shutil.copyfile(source, partial)


def open_regular(path: Path) -> int:
    """Open a file of a run folder and return its descriptor. Raises ``OSError`` for anything else.

    A link leads elsewhere and a pipe or device has no end: both are refused."""
    if path.is_symlink():
        raise OSError("it is a link")
    # NOFOLLOW: the file may become a link meanwhile. NONBLOCK: to open a pipe would wait for a
    # writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("it is no regular file")
    return file


def read_regular(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return the content of a small file of a run folder. Raises ``OSError`` for anything else."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"it is larger than {max_bytes:,} bytes")
    return content


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a path to write to, and give it the name of the target once its bytes are on the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{_PARTIAL}{target.name}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Force a file's data, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_empty(folder: Path) -> None:
    """Remove a folder unless it has files other than those that a killed writer has left."""
    with suppress(OSError):
        if all(name.startswith(_PARTIAL) for name in os.listdir(folder)):
            shutil.rmtree(folder)


def find_files(root: Path) -> dict[str, dict[str, Any]]:
    """Return size and time of every whole file below a folder. Raises ``OSError``: fsspec hides errors."""
    found: dict[str, dict[str, Any]] = {}
    for parent, _, names in os.walk(root, onerror=_raise_unless_gone):
        for name in names:
            if name.startswith(_PARTIAL):
                continue
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:  # removed meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                found[path] = {"size": status.st_size, "mtime": status.st_mtime_ns}
    return found


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
