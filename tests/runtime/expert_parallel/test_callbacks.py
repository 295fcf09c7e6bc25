"""Callbacks of a run on expert hosts, through the loss of the main one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator.record.files.events import of_kind, read_events
from tests.support.hosts.cluster import RayCluster
from tests.support.runs.cli_runs import finish_run, kill_worker, read_summary, start_run, wait_for_steps

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
CALLBACK = """
from pathlib import Path

from orchestrator import Callback, Request


class Watch(Callback):
    def __init__(self):
        self.num_failures = 0

    def on_start(self, start):
        self.calls = (start.run_dir.parent / "calls.txt").open("w", buffering=1)
        self.calls.write(f"start of {start.workers}\\n")

    def on_failure(self, failure):
        self.num_failures += 1
        self.calls.write(f"failure of {failure.rank}\\n")
        return Request(save=True, log={"failures": self.num_failures})

    def on_checkpoint(self, checkpoint):
        self.calls.write(f"checkpoint {checkpoint.path.is_dir()}\\n")
        if self.num_failures:
            return Request(stop=f"saved after {self.num_failures} failure")

    def on_end(self, end):
        self.calls.write(f"end {end.status}\\n")
"""


def test_callbacks_keep_their_state_when_the_main_host_is_lost(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CALLBACK)
    run_dir = tmp_path / "run"
    flags = "--parallel-strategy expert_parallel --workers 2 --epochs 1000 --checkpoint-every 100000"
    process = start_run(shared_cluster, run_dir, *shlex.split(flags), "--callbacks", "mine:Watch")
    wait_for_steps(process, run_dir, 20)
    kill_worker(run_dir, 0)
    finish_run(process)
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls[:3] == ["start of 2", "failure of 0", "checkpoint True"]
    assert calls[-1] == "end completed"
    summary = read_summary(run_dir)
    assert (summary["status"], summary["recoveries"]) == ("completed", 1)
    assert summary["reason"] == "Watch.on_checkpoint asked to stop: saved after 1 failure"
    (logged,) = of_kind(read_events(run_dir / "events.jsonl"), "log")
    assert logged["values"] == {"failures": 1.0}
