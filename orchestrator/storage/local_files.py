"""The files of file://, as an object store has them: every error is told."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any


def find_files(root: Path) -> dict[str, dict[str, Any]]:
    """Return size and time of every file below a folder. Raises ``OSError``: fsspec leaves errors out."""
    found: dict[str, dict[str, Any]] = {}
    for parent, _, names in os.walk(root, onerror=_raise_unless_gone):
        for name in names:
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
