"""Tests of prestarted processes: the next group takes them, and none is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import finish_run, kill_worker, start_run, wait_for_steps
from orchestrator.record.files.reading import of_kind, read_events


def idle_processes(cluster: RayCluster) -> set[int]:
    """Return the ids of Ray's idle processes on the head."""
    pids: set[int] = set()
    for process in psutil.Process(cluster.nodes[0].pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.name() == "ray::IDLE":
                pids.add(process.pid)
    return pids


def with_torch(pids: set[int]) -> set[int]:
    """Return the processes that have loaded torch, as successors of workers do."""
    loaded: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"):
                loaded.add(pid)
    return loaded


def wait_until(ready: Callable[[], object], message: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, message
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_next_group_takes_the_successors_and_none_is_left(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    before = idle_processes(shared_cluster)

    def new_processes() -> set[int]:
        return idle_processes(shared_cluster) - before

    settings = ("--epochs", "100000", "--checkpoint-every", "10", "--workers", "2")
    process = start_run(shared_cluster, run_dir, *settings)
    wait_for_steps(process, run_dir, 20)
    # They import at the lowest priority, beside workers that leave little of the cores.
    wait_until(
        lambda: len(with_torch(new_processes())) >= 2,
        "no successors of the two workers",
        seconds=300,
    )
    successors = new_processes()
    kill_worker(run_dir, 1)
    wait_until(lambda: of_kind(read_events(run_dir / "events.jsonl"), "recovery"), "not recovered")
    workers = {int((run_dir / "logs" / f"worker_{rank}.pid").read_text()) for rank in (0, 1)}
    assert workers <= successors
    process.send_signal(signal.SIGINT)
    finish_run(process, code=130, timeout=60)
    wait_until(
        lambda: not with_torch(idle_processes(shared_cluster)),
        "a finished job left processes behind",
        seconds=30,
    )
