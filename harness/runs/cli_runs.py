"""Whole runs by the command line, on a cluster or in one process.

A run that is killed or signalled is a program of its own (``start_run``). Every other one is a process
that has torch loaded already (``complete_run``), which saves seconds."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.hosts.cluster import RayCluster, connected
from harness.hosts.ranks import run_ranks
from harness.runs.records import by_step
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.report.run import page
from orchestrator.report.run.figures.read import RunRecord

SIZES = shlex.split(
    "--width 16 --expert-hidden-size 8 16 8 --experts 3 --layers 1 --evolution off --global-batch-size 50"
)
QUIET = shlex.split(
    "--trackers --no-monitor-gpu --plots off --learning-rate 1e-3 --log-every 2 --schedule constant"
)


def arguments_of(run_dir: Path, *extra: str) -> list[str]:
    return ["train", "--run-dir", str(run_dir), *SIZES, *QUIET, *extra]


def command(run_dir: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator", *arguments_of(run_dir, *extra)]


def start_run(cluster: RayCluster, run_dir: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command(run_dir, *extra), "--ray-address", cluster.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
        env=cluster.environment,
        start_new_session=True,
    )


def finish_run(process: subprocess.Popen[str], code: int = 0, timeout: float = 400) -> str:
    """Wait for the end of a run, which must exit with ``code``. Return its output."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"did not end within {timeout} s:\n{output}")
    assert process.returncode == code, output
    return output


def complete_run(cluster: RayCluster | None, run_dir: Path, *extra: str, code: int = 0) -> str:
    """Run to the end, which must come with exit code ``code``. Return the output."""
    return complete(cluster, run_dir.parent, arguments_of(run_dir, *extra), code)


def complete(cluster: RayCluster | None, folder: Path, arguments: list[str], code: int = 0) -> str:
    """Run a command line in a folder; on the cluster, if one is given. Return the output."""
    environment = {} if cluster is None else variables_of(cluster)
    (outcome,) = run_ranks(run_in_rank, 1, arguments, str(folder), environment, timeout=900)
    exit_code, output = outcome
    assert exit_code == code, f"{arguments}\n{output}"
    return output


def variables_of(cluster: RayCluster) -> dict[str, str]:
    """Return the environment variables with which a process joins a cluster."""
    changed = {key: value for key, value in cluster.environment.items() if os.environ.get(key) != value}
    return changed | {"RAY_ADDRESS": cluster.address}


def run_in_rank(
    _rank: int, _size: int, _store: str, arguments: list[str], folder: str, environment: dict[str, str]
) -> tuple[int, str]:
    """Run a command line in this process. Returns exit code and output."""
    from orchestrator.cli.main import main

    log = enter_folder(folder, environment)
    if "--plots" not in arguments:
        leave_out_pictures()
    code = main(arguments)
    return code, log.read_text(encoding="utf-8", errors="replace")


def leave_out_pictures() -> None:
    """Draw none at the end of the runs of this process: that takes longer than a short run."""

    def draws_nothing(record: RunRecord) -> bool:
        return False

    page.draws_at_end = draws_nothing


def enter_folder(folder: str, environment: dict[str, str]) -> Path:
    """Work in a folder, with all output in a file next to it. Returns the file."""
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    log = Path(folder).with_suffix(".log")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return log


def losses(run_dir: Path) -> list[float]:
    return [event["loss"] for event in by_step(read_events(run_dir / "events.jsonl"))]


def read_summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def steps_recorded(run_dir: Path) -> int:
    return len(of_kind(read_events(run_dir / "events.jsonl"), "step"))


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, more: int, timeout: float = 120) -> None:
    """Wait until ``more`` further steps are recorded."""
    target = steps_recorded(run_dir) + more
    deadline = time.monotonic() + timeout
    while steps_recorded(run_dir) < target:
        if process.poll() is not None:
            pytest.fail(f"ended too early:\n{process.communicate()[0]}")
        assert time.monotonic() < deadline, f"not enough steps within {timeout} s"
        time.sleep(0.02)


def kill_worker(run_dir: Path, rank: int) -> None:
    os.kill(int((run_dir / "logs" / f"worker_{rank}.pid").read_text()), signal.SIGKILL)


def single_process_losses(run_dir: Path, *extra: str) -> list[float]:
    """Run in one process. Return the losses."""
    complete_run(None, run_dir, *extra)
    return losses(run_dir)


def living_actors(cluster: RayCluster) -> list[str]:
    """Return the class names of the actors that live in the cluster."""
    with connected(cluster):
        from ray._private.state import actors

        known: dict[str, Any] = actors()
        living = [actor for actor in known.values() if actor["State"] != "DEAD"]
        names = [actor["ActorClassName"] for actor in living]
    return [name for name in names if "Coordinator" not in name]
