"""Files that are whole or not there: a reader of the run folder never meets half a page."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from orchestrator.errors import UserError


def write_whole(path: Path, data: str | bytes) -> Path:
    """Writes beside the file, then renames over it. What was there before stays until the new one is complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Text may hold lone surrogates (JSON can carry them), which no encoding can: they become question marks.
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:  # never through a link that lies in wait under that name
            file.write(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, IsADirectoryError):
            raise UserError(f"{path} is a folder, and a file is to be written there; move it away") from None
        raise
    return path
