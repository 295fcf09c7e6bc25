"""Folders that the processes of a machine make once and share, in ``~/.cache/expert-orchestrator``.

The cache takes at most as much of its disk as it leaves free. Folders that no process uses are removed
for new ones, the least recently used first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from orchestrator.storage.local_files import sync

_KEY_CHARACTERS = 20
_LOCK = ".lock"
_PARTIAL = ".part"
_USED = ".used"
"""A file beside each folder: locked while a process uses the folder, and as old as its last use."""
_in_use: dict[Path, IO[str]] = {}
"""The locks of the folders that this process uses, until it ends."""


def cached_folder(
    key: str,
    write: Callable[[Path], None],
    *,
    is_whole: Callable[[Path], bool] = lambda folder: True,  # noqa: ARG005
    on_wait: Callable[[], None] = lambda: None,
) -> Path:
    """Return the folder of a key; ``write`` fills it unless a process of this machine did before.

    The folder is there as a whole or not at all, and stays while this process lives. A folder that is not
    ``is_whole`` is written again. ``on_wait`` is called when another process is writing.
    """
    folder = Path.home() / ".cache" / "expert-orchestrator" / key[:_KEY_CHARACTERS]
    folder.parent.mkdir(parents=True, exist_ok=True)
    is_new = False
    with _locked(folder.with_suffix(_LOCK), on_wait):
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            _write_whole(folder, write)
            is_new = True
        _use(folder)
    if is_new:
        _evict(folder.parent)
    return folder


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place, and move it there once its bytes are on the disk."""
    partial = folder.with_suffix(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write(partial)
    # After a loss of power a folder with its name but without its bytes would be taken for whole.
    for parent, _, files in os.walk(partial, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
    os.rename(partial, folder)
    sync(folder.parent)


def _use(folder: Path) -> None:
    """Keep a folder from being removed until this process ends."""
    path = folder.with_suffix(_USED)
    if folder not in _in_use:
        _in_use[folder] = path.open("a")
        fcntl.flock(_in_use[folder], fcntl.LOCK_SH)
    os.utime(path)


def _evict(root: Path) -> None:
    """Remove folders that no process uses, until the cache takes no more of its disk than is free."""
    sizes = {path: _num_bytes(path) for path in root.iterdir() if path.is_dir()}
    for folder in sorted(sizes, key=_last_use):
        if sum(sizes.values()) <= shutil.disk_usage(root).free:
            return
        if _remove_unused(folder):
            del sizes[folder]


def _remove_unused(folder: Path) -> bool:
    """Remove a folder unless a process writes or uses it, and return whether it is gone."""
    # A partial folder of a killed writer has the lock of its whole one.
    place = folder.with_suffix("")
    with place.with_suffix(_LOCK).open("w") as writing, place.with_suffix(_USED).open("a") as using:
        try:
            fcntl.flock(writing, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(using, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Renamed first: a folder of which a part is gone must not have the name of a whole one.
        partial = place.with_suffix(_PARTIAL)
        if folder != partial:
            shutil.rmtree(partial, ignore_errors=True)
            os.rename(folder, partial)
        shutil.rmtree(partial)
    return True


def _last_use(folder: Path) -> float:
    """Return the time of a folder's last use; 0 for the remains of a killed writer."""
    with suppress(FileNotFoundError):
        return 0.0 if folder.suffix == _PARTIAL else folder.with_suffix(_USED).stat().st_mtime
    return 0.0


def _num_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that go meanwhile have none."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process of this machine at a time write a folder."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
