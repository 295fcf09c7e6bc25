"""A second Ctrl-C while workers start: the run ends at once, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import command, finish_run, living_actors, start_run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
_EXIT_SECONDS = 30.0


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read the output of a run up to a line with this text."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"ended without {text!r}:\n{''.join(lines)}")


def interrupt_twice(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Interrupt a run twice while its workers start. Return the processes that it had started."""
    read_until(process, "starting 2 workers")
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping after this step")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output = finish_run(process, code=130, timeout=60)
    assert "Traceback" not in output
    return started


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for processes to exit. Return those that do not."""
    return psutil.wait_procs(processes, timeout=_EXIT_SECONDS)[1]


@pytest.mark.extended
def test_in_a_cluster_it_leaves_no_actor(shared_cluster: RayCluster, tmp_path: Path) -> None:
    process = start_run(shared_cluster, tmp_path / "run", "--epochs", "100000", "--workers", "2")
    assert still_running(interrupt_twice(process)) == []
    deadline = time.monotonic() + _EXIT_SECONDS
    while living_actors(shared_cluster) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert living_actors(shared_cluster) == []


@pytest.mark.slow
def test_a_cluster_that_the_run_started_ends_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "run", "--epochs", "100000", "--workers", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": ""},
        start_new_session=True,
    )
    assert still_running(interrupt_twice(process)) == []
