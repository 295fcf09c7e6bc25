"""The folder of an export, which appears when all of it is written, and the small files in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import UserError
from orchestrator.storage.local_files import sync


def check_target(target: Path) -> None:
    """Raise ``UserError`` unless the folder is new or empty."""
    try:
        is_used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; choose another folder") from None
    if is_used:
        raise UserError(f"{target} exists and is not empty; choose another folder, or remove it")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to, which gets the target's name at the end of the block."""
    check_target(target)
    partial = _new_partial(target)
    yield partial
    _publish(partial, target)


def _new_partial(target: Path) -> Path:
    """Create the folder that is written, in place of that of an export that was killed."""
    partial = target.absolute().with_name(f".exporting-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write beside {target}: {error.strerror}; choose another folder") from None
    return partial


def _publish(partial: Path, target: Path) -> None:
    """Give a complete folder its name."""
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    if target.exists():
        target.rmdir()  # it is empty
    os.rename(partial, target)
    sync(target.absolute().parent)
