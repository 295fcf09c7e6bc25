"""What a probe of the machine is, and the verdict it returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

SUBPROCESS_SECONDS = 120.0
GPU_FIX = "run nvidia-smi; update the driver or install the torch build that fits it; --gpu-mode cpu trains without a GPU"


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one probe: what was found, what was needed, what to do."""

    name: str
    status: Literal["pass", "fail", "skip"]
    found: str
    needed: str = ""
    fix: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class MachineProbe:
    """A check still to be run. ``fix`` is for errors that the check itself does not foresee."""

    name: str
    run: Callable[[], CheckResult]
    fix: str


def verdict(name: str, passed: bool, found: str, needed: str, fix: str) -> CheckResult:
    return (
        CheckResult(name, "pass", found, needed) if passed else CheckResult(name, "fail", found, needed, fix)
    )


def run_python(code: str, *arguments: str, timeout: float) -> tuple[bool, str]:
    """Whether a fresh Python ran the code, and the last line it wrote. One that is late is killed
    with all it started."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            output, errors = child.communicate(timeout=timeout)
        except BaseException as error:  # Ctrl-C too: it reaches only us, the child has a session of its own
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return False, f"no answer after {timeout:g} s"
            raise
    lines = [line for line in (errors if child.returncode else output).splitlines() if line.strip()]
    return child.returncode == 0, lines[-1].strip() if lines else f"exit code {child.returncode}, no message"
