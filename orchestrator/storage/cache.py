"""Folders that the processes of a machine make once and share, in ``~/.cache/expert-orchestrator``."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_KEY_CHARACTERS = 20


def cached_folder(
    key: str,
    write: Callable[[Path], None],
    *,
    is_whole: Callable[[Path], bool] = lambda folder: True,  # noqa: ARG005
    on_wait: Callable[[], None] = lambda: None,
) -> Path:
    """Return the folder of a key; ``write`` fills it unless a process of this machine did before.

    The folder is there as a whole or not at all. A folder that is not ``is_whole`` is written again: a loss
    of power may cut its files. ``on_wait`` is called when another process is writing.
    """
    folder = Path.home() / ".cache" / "expert-orchestrator" / key[:_KEY_CHARACTERS]
    with _locked(folder.with_suffix(".lock"), on_wait):
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            partial = folder.with_suffix(".part")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write(partial)
            os.rename(partial, folder)
    return folder


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process of this machine at a time write a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
