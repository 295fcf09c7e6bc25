"""The Slurm script for real: two raylets of this machine as nodes, under stubs of ``srun`` and ``scontrol``.

The stub of ``srun`` starts the command once for each node, here on one machine, and passes SIGTERM on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.hosts.cluster import processes_of_session
from harness.runs.cli_runs import QUIET, SIZES, read_summary, steps_recorded
from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill "${pids[@]}"; wait; exit 143' TERM
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_PROCID=$node "$@" &
  pids+=($!)
done
wait
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$SCONTROL_CALLS"
"""
STEPS = 4000
"""More than a run makes before it is asked to stop."""
WAIT_S = 240


@dataclass(frozen=True)
class SlurmJob:
    """A script, and the folder with its stubs and its run."""

    folder: Path
    number: int

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "mine"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SCONTROL_CALLS": str(self.folder / "scontrol"),
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "1",
        }

    def start(self, max_steps: int) -> subprocess.Popen[str]:
        options = LaunchOptions(
            "slurm", workers=2, gpus_per_node=0, run_dir=self.run_dir, python=sys.executable
        )
        flags = (*SIZES, *QUIET, "--max-steps", str(max_steps), "--epochs", str(max_steps))
        script = self.folder / "slurm.sbatch"
        script.write_text(file_text(Launch(options, flags)), encoding="utf-8")
        log = (self.folder / "log").open("a")
        return subprocess.Popen(
            ["bash", str(script)],
            stdout=log,
            stderr=log,
            env=self.environment,
            cwd=self.folder,
            text=True,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    @property
    def calls(self) -> str:
        path = self.folder / "scontrol"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SlurmJob]:
    folder = tmp_path
    (folder / "bin").mkdir()
    (folder / "runs").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    number = free_job_number()
    try:
        yield SlurmJob(folder, number)
    finally:
        for path in Path("/tmp").glob(f"ray-{number}-*"):
            shutil.rmtree(path, ignore_errors=True)


def free_job_number() -> int:
    """Return a number whose port is free: the script takes it from the number of its job."""
    while True:
        number = random.SystemRandom().randrange(1, 10**6)
        base = 20000 + number % 10000
        with suppress(OSError):
            with socket.socket() as probe:
                probe.bind(("", base))
            return number


def wait_until(condition: Callable[[], bool], job: SlurmJob, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, job.log
        assert time.monotonic() < deadline, job.log
        time.sleep(0.1)


def finish(process: subprocess.Popen[str], job: SlurmJob) -> int:
    """Wait for the end of a script, and check that none of its processes is left."""
    try:
        code = process.wait(WAIT_S)
        left = processes_of_session(process.pid)
        deadline = time.monotonic() + 30
        while left and time.monotonic() < deadline:
            time.sleep(0.2)
            left = processes_of_session(process.pid)
        assert left == [], job.log
        return code
    finally:
        for pid in processes_of_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_job_near_its_time_limit_saves_is_queued_again_and_continues(job: SlurmJob) -> None:
    process = job.start(STEPS)
    try:
        wait_until(lambda: job.run_dir.exists() and steps_recorded(job.run_dir) >= 4, job, process)
        # Slurm sends the signal to the script alone.
        process.send_signal(signal.SIGUSR1)
    finally:
        code = finish(process, job)
    assert code == 130, job.log
    assert job.calls == f"requeue {job.number}\n"
    stopped = read_summary(job.run_dir)
    assert (stopped["status"], stopped["workers"]) == ("stopped", 2)

    more = stopped["steps"] + 3
    assert finish(job.start(more), job) == 0, job.log
    finished = read_summary(job.run_dir)
    assert (finished["status"], finished["steps"]) == ("completed", more)
    assert f"resumed at step {stopped['steps']}" in job.log
    assert job.calls.count("requeue") == 1
