"""Helpers of the tests of the command line: a call in this process, and its answer."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 25
"""Lines of an answer to a mistake."""


@dataclass(frozen=True)
class Answer:
    """The exit code and the output of a call."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The output, stderr first, without colours and empty lines."""
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", f"{self.err}\n{self.out}")
        return [line for line in plain.splitlines() if line.strip()]


Call = Callable[..., Answer]


def run_program(folder: Path, *argv: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run ``orchestrator`` in a process of its own; ``options`` are Python's."""
    command = [sys.executable, "-B", *options, "-m", "orchestrator", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def check_answer(answer: Answer, cause: str) -> None:
    """Check that an answer to a mistake is short and begins with the cause."""
    assert answer.code == 2, answer
    assert len(answer.lines) <= MAX_LINES, answer.lines
    assert cause in answer.lines[0], answer.lines
    assert answer.lines[0].startswith("orchestrator: "), answer.lines
    assert "Traceback" not in answer.err + answer.out
