"""Whole runs by the command line, on a cluster or in one process."""

from __future__ import annotations

import ast
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

from orchestrator.record.events import by_step, of_kind, read_events
from tests.support.cluster import RayCluster

SIZES = shlex.split("--width 16 --expert-hidden-size 8 16 8 --experts 3 --layers 1 --global-batch-size 50")
QUIET = shlex.split("--trackers --no-monitor-gpu --learning-rate 1e-3 --log-every 2 --schedule constant")


def command(run_dir: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator", "train", "--run-dir", str(run_dir), *SIZES, *QUIET, *extra]


def start_run(cluster: RayCluster | None, run_dir: Path, *extra: str) -> subprocess.Popen[str]:
    address = ["--ray-address", cluster.address] if cluster else []
    return subprocess.Popen(
        [*command(run_dir, *extra), *address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
        env=cluster.environment if cluster else None,
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
    finish_run(start_run(None, run_dir, *extra))
    return losses(run_dir)


_LIST_ACTORS = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
from ray._private.state import actors
print([a['ActorClassName'] for a in actors().values()
       if a['State'] != 'DEAD' and 'Coordinator' not in a['ActorClassName']])
"""


def living_actors(cluster: RayCluster) -> list[str]:
    """Return the class names of the actors that live in the cluster."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST_ACTORS, cluster.address],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.strip().splitlines()[-1])
