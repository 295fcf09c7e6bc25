"""Logs that others wrote, kept without the secrets in them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from orchestrator.redaction import Secrets, mask


def copy_masked(source: Path, target: Path, secrets: Secrets) -> None:
    """Copy a log, masked line by line. Where ``target`` is the log itself, it is written anew only if there is something to hide."""
    if source == target and not _holds_any(source, secrets):
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    beside.unlink(missing_ok=True)
    try:
        with (
            _opened(source) as read,
            beside.open("x", encoding="utf-8", errors="surrogateescape", newline="") as write,
        ):
            write.writelines(mask(line, secrets) for line in read)
        beside.replace(target)
    finally:
        with suppress(OSError):
            beside.unlink()


def _holds_any(path: Path, secrets: Secrets) -> bool:
    with _opened(path) as read:
        return any(mask(line, secrets) != line for line in read)


def _opened(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="surrogateescape", newline="")
