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
GPU_FIX = (
    "run nvidia-smi; update the driver or install the torch build that fits it; "
    "--gpu-mode cpu trains without a GPU"
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one probe: what was found, what was needed, and what to do."""

    name: str
    status: Literal["pass", "fail", "skip"]
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


def run_python(code: str, *arguments: str, timeout_s: float) -> tuple[bool, str]:
    """Run code in a fresh Python; return whether it succeeded and the last line that it wrote.

    A process that exceeds the timeout is killed with all processes that it started.
    """
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            output, errors = child.communicate(timeout=timeout_s)
        except BaseException as error:
            # Ctrl-C too: the child has a session of its own, so the signal reaches only this
            # process.
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return False, f"no answer after {timeout_s:g} s"
            raise
    text = errors if child.returncode else output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return child.returncode == 0, lines[-1] if lines else f"exit code {child.returncode}, no message"
