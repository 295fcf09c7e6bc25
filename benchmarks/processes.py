"""Processes of benchmarks: started in a session of their own, watched, killed by rank, and cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 600.0
_TERMINATE_S = 20


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own.

    At the end, kill what is left of that session, and nothing else.
    """
    # the plain scripts are started by their path: without this they would not find the packages
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        # asked before the process ends: afterwards its children belong to another parent
        with suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
        end(process, children)


def end(process: subprocess.Popen[bytes], children: list[psutil.Process]) -> None:
    """End a process, its children, and whatever else belongs to its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_S)
    members = [other for other in psutil.process_iter() if _session(other.pid) == process.pid]
    for other in [*children, *members]:
        with suppress(psutil.Error):
            other.kill()  # psutil compares the creation time too: a reused process id is left alone
    process.wait()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def belongs_to(pid: int, root: int) -> bool:
    """Report whether a process is in the session of ``root`` or descends from it."""
    try:
        return os.getsid(pid) == root or root in [parent.pid for parent in psutil.Process(pid).parents()]
    except (OSError, psutil.Error):
        return False


def kill(pid: int, process: subprocess.Popen[bytes]) -> float:
    """Send SIGKILL to a process that belongs to ``process``.

    Returns the time; refuses any other process.
    """
    if not belongs_to(pid, process.pid):
        raise RuntimeError(f"process {pid} does not belong to {process.pid}: not killed")
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed


def wait_until(
    condition: Callable[[], bool],
    process: subprocess.Popen[bytes],
    folder: Path,
    poll_s: float = 0.01,
    timeout_s: float = LONGEST_S,
) -> None:
    """Wait for a condition.

    Raises with the end of the output where the process ends first, or takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended or took over {timeout_s:g} s:\n{tail(folder)}")
        time.sleep(poll_s)


def tail(folder: Path) -> str:
    """Return the last lines that a started process wrote."""
    return (folder / "output.txt").read_text(errors="replace")[-3000:]
