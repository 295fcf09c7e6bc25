"""The probe of a machine check, its result, and the subprocess that some probes run in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

SUBPROCESS_TIMEOUT_S = 120.0
SLOW_FIX = "the machine is busy, or its disk is slow: check again when it is idle"
GPU_FIX = (
    "run nvidia-smi; update the driver or install the torch build that fits it; "
    "--gpu-mode cpu trains without a GPU"
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one probe: what was found, what was needed, and what to do.

    ``warn`` is for what training does not need, and some other command would stumble over."""

    name: str
    status: Literal["pass", "fail", "warn", "skip"]
    found: str
    needed: str = ""
    fix: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class MachineProbe:
    """A check that has not run yet. ``fix`` is the advice for errors that the check itself does
    not expect."""

    name: str
    run: Callable[[], CheckResult]
    fix: str


def verdict(name: str, passed: bool, found: str, needed: str, fix: str) -> CheckResult:
    """Return a passed check, or a failed one with its fix."""
    if passed:
        return CheckResult(name, "pass", found, needed)
    return CheckResult(name, "fail", found, needed, fix)


@dataclass(frozen=True)
class Answer:
    """The end of a process: whether it succeeded, and the last line that it wrote."""

    passed: bool
    line: str
    timed_out: bool = False

    def fix(self, otherwise: str) -> str:
        """Return what to do: an answer that did not come says nothing about what is installed."""
        return SLOW_FIX if self.timed_out else otherwise


def run_python(
    code: str, *arguments: str, timeout_s: float, python: str = sys.executable, folder: str | None = None
) -> Answer:
    """Run code in a fresh Python, in a folder; return its answer.

    A process that exceeds the timeout is killed with all processes that it started.
    """
    command = [python, "-c", code, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
    ) as child:
        try:
            output, errors = child.communicate(timeout=timeout_s)
        except BaseException as error:
            # Ctrl-C too: the child has a session of its own, so the signal reaches only this
            # process.
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return Answer(False, f"no answer after {timeout_s:g} s", timed_out=True)
            raise
    text = errors if child.returncode else output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[-1] if lines else f"exit code {child.returncode}, no message"
    return Answer(child.returncode == 0, line)
