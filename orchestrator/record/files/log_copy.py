"""Copies of foreign log files, without the secrets in them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from orchestrator.redaction import Secrets, mask


def copy_masked(source: Path, target: Path, secrets: Secrets) -> None:
    """Copy a log and mask it line by line. If ``target`` is ``source``, rewrite it only if it
    holds a secret."""
    if source == target and not _holds_secret(source, secrets):
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    try:
        # Mode "x" never writes through a link that someone placed under this name.
        with (
            _open_log(source) as reader,
            partial.open("x", encoding="utf-8", errors="surrogateescape", newline="") as writer,
        ):
            writer.writelines(mask(line, secrets) for line in reader)
        partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink()


def _holds_secret(path: Path, secrets: Secrets) -> bool:
    with _open_log(path) as reader:
        return any(mask(line, secrets) != line for line in reader)


def _open_log(path: Path) -> TextIO:
    """Open a log for reading, so that its bytes survive a round trip whatever their encoding is."""
    return path.open(encoding="utf-8", errors="surrogateescape", newline="")
