"""Atomic writing of files: a reader of the run folder never sees half a page."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from orchestrator.errors import UserError


def write_whole(path: Path, data: str | bytes) -> Path:
    """Write to a temporary name and rename; the old file stays until the new one is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON can carry lone surrogates, which UTF-8 cannot encode: they become question marks.
    content = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
    try:
        partial.unlink(missing_ok=True)
        # Mode "x" never writes through a link that someone placed under this name.
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, IsADirectoryError):
            raise UserError(f"{path} is a folder, but the report writes a file there; move it away") from None
        raise
    return path
