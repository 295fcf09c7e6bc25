"""A run folder to attack, and calls of the command line on it."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.main import main

SMALL = (
    *("--task", "synthetic", "--width", "8", "--sequence-length", "8"),
    *("--layers", "1", "--experts", "2", "--samples", "32"),
)
RUN = (
    *SMALL,
    *("--gpu-mode", "cpu", "--trackers", "--no-monitor-gpu"),
    *("--batch-size", "8", "--epochs", "50", "--checkpoint-every", "2"),
)
DEEP = "[" * 100_000 + "]" * 100_000
"""JSON that overflows the stack of a recursive reader."""
MARKUP = "<script>alert(1)</script>\x1b[2J\u202e"


@dataclass(frozen=True)
class Scene:
    """A run folder to spoil, a file outside that must not change, and a canary that must never exist."""

    folder: Path
    outside: Path
    canary: Path

    @property
    def newest(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "checkpoints" / "step_00000004"


Spoil = Callable[[Scene], Any]
"""Damages the run folder of a scene."""


def call(*argv: str) -> tuple[int, str]:
    """Run ``orchestrator …`` in this process and return exit code and output. A traceback fails the test."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, output.getvalue()


def resume(scene: Scene) -> tuple[int, str]:
    """Continue the run of a scene for one step."""
    return call("train", *RUN, "--run-dir", str(scene.folder), "--max-steps", "5", "--resume", "auto")


def hashes_outside(root: Path) -> dict[str, str]:
    """Return the hashes of all files outside the working folder."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_relative_to(root / "work")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_harmless(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
