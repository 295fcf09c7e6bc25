"""A run that is told to stop before it trains: exit code 130, a few words, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from harness.runs.cli_runs import command, finish_run

_SOON_S = 60.0


def children(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Return the processes that a run has started, by their id."""
    try:
        return {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_sigterm_while_the_cluster_starts(tmp_path: Path) -> None:
    """Ray's own handler would end the process wherever it is, with exit code 15 or an abort."""
    process = subprocess.Popen(
        command(tmp_path / "run", "--workers", "2", "--ray-address", "local"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": ""},
        start_new_session=True,
    )
    started: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + _SOON_S
    while not any(_name(child) == "gcs_server" for child in started.values()):
        assert time.monotonic() < deadline, "no cluster was started"
        started |= children(process)
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None and time.monotonic() < deadline:
        started |= children(process)
        time.sleep(0.02)
    output = finish_run(process, code=130, timeout=_SOON_S)
    assert "interrupted" in output
    assert "Traceback" not in output
    assert psutil.wait_procs(list(started.values()), timeout=_SOON_S)[1] == []
