"""Data parallel through Ray Train, end to end: kills, lost nodes, signals, jobs and user errors."""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.hosts.cluster import RAY, RayCluster, local_cluster
from harness.runs.cli_runs import (
    command,
    complete,
    complete_run,
    finish_run,
    kill_worker,
    living_actors,
    losses,
    read_summary,
    single_process_losses,
    start_run,
    steps_recorded,
    wait_for_steps,
)
from harness.runs.records import by_step
from orchestrator.record.files.reading import of_kind, read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_a_killed_worker_costs_some_steps_and_nothing_else(
    shared_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run joins a cluster, loses a worker to SIGKILL and restarts from its checkpoint.

    Its losses are those of an undisturbed process, and the cluster is left as it was."""
    monkeypatch.setitem(shared_cluster.environment, "WANDB_API_KEY", "not-for-the-record")
    run_dir = tmp_path / "run"
    length = shlex.split("--max-steps 80 --epochs 100 --checkpoint-every 10")
    process = start_run(shared_cluster, run_dir, *length, "--workers", "2")
    wait_for_steps(process, run_dir, 10)
    kill_worker(run_dir, 1)
    output = finish_run(process)
    expected = single_process_losses(tmp_path / "alone", *length)
    assert losses(run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)
    assert losses(run_dir) == pytest.approx(expected, rel=2e-2)
    assert "worker 1 was lost" in output or "worker 1 lost" in output
    summary = read_summary(run_dir)
    assert (summary["status"], summary["workers"]) == ("completed", 2)
    assert (summary["failures"], summary["recoveries"]) == (1, 1)
    assert not re.search(r"ray\.|\(RayTrainWorker|Traceback|WARNING", output), output
    assert living_actors(shared_cluster) == []
    assert summary["final"]["weights"] == "best"
    check_recovery(run_dir)


def check_recovery(run_dir: Path) -> None:
    """The driver has recorded the restart, with times that add up to the first step after it."""
    events = read_events(run_dir / "events.jsonl")
    (recovery,) = of_kind(events, "recovery")
    assert (recovery["workers_before"], recovery["workers"], recovery["source"]) == (2, 2, "disk")
    (failure,) = of_kind(events, "failure")
    assert recovery["lost_steps"] == failure["step"] - recovery["step"] >= 0
    restart = of_kind(events, "start")[-1]
    first_step = next(event for event in events[events.index(restart) :] if event["event"] == "step")
    assert recovery["step"] == restart["step"] == first_step["step"] - 1
    parts = [recovery[f"{part}_seconds"] for part in ("detect", "regroup", "restore")]
    assert min(parts) > 0
    assert recovery["total_seconds"] == pytest.approx(
        sum(parts) + first_step["time"] - restart["time"], abs=1e-3
    )
    assert recovery["replay_seconds"] >= first_step["time"] - restart["time"]


def test_more_workers_than_the_cluster_has_are_refused(shared_cluster: RayCluster, tmp_path: Path) -> None:
    output = complete_run(shared_cluster, tmp_path / "run", "--workers", "9", code=3)
    assert "--workers 9" in output
    assert "4 CPUs" in output
    assert len(output.strip().splitlines()) <= 4


@pytest.mark.slow
def test_a_restarted_deterministic_run_is_equal_to_the_bit(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    length = shlex.split("--max-steps 300 --epochs 100 --checkpoint-every 10 --workers 2 --deterministic")
    complete_run(shared_cluster, tmp_path / "calm", *length)
    process = start_run(shared_cluster, tmp_path / "run", *length, "--max-failures", "5")
    for rank in (0, 1):
        wait_for_steps(process, tmp_path / "run", 45)
        kill_worker(tmp_path / "run", rank)
    finish_run(process)
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills(shared_cluster: RayCluster, tmp_path: Path) -> None:
    """Random workers of three are killed, one after the other: the run completes with the
    undisturbed losses."""
    length = shlex.split("--max-steps 2000 --epochs 1000 --checkpoint-every 20 --workers 3 --deterministic")
    run_dir = tmp_path / "run"
    generator = random.Random(3)
    process = start_run(shared_cluster, run_dir, *length, "--max-failures", "20")
    for _ in range(10):
        wait_for_steps(process, run_dir, generator.randrange(30, 80))
        kill_worker(run_dir, generator.randrange(3))
    finish_run(process, timeout=900)
    complete_run(shared_cluster, tmp_path / "calm", *length)
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("completed", 2000)
    assert (summary["failures"], summary["recoveries"]) == (10, 10)
    assert losses(run_dir)[:50] == pytest.approx(losses(tmp_path / "calm")[:50], rel=1e-5)


@pytest.mark.slow
def test_a_lost_node_leaves_the_others_to_continue(tmp_path: Path) -> None:
    with local_cluster(cpus=1) as cluster:
        lost = cluster.add_node(cpus=1)
        cluster.add_node(cpus=1)
        run_dir = tmp_path / "run"
        length = shlex.split("--max-steps 600 --epochs 100 --checkpoint-every 10")
        process = start_run(cluster, run_dir, *length, "--workers", "3")
        wait_for_steps(process, run_dir, 40)
        cluster.kill_node(lost)
        finish_run(process)
    summary = read_summary(run_dir)
    assert (summary["status"], summary["workers"], summary["steps"]) == ("completed", 2, 600)
    assert of_kind(read_events(run_dir / "events.jsonl"), "recovery")[0]["workers_before"] == 3
    expected = single_process_losses(tmp_path / "alone", *length)
    assert losses(run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)


@pytest.mark.slow
def test_the_text_task_on_three_workers(shared_cluster: RayCluster, tmp_path: Path) -> None:
    length = shlex.split("--task text --max-steps 40 --sequence-length 32")
    complete_run(shared_cluster, tmp_path / "run", *length, "--workers", "3")
    expected = single_process_losses(tmp_path / "alone", *length)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_of_workers_keeps_its_settings_and_its_outcome(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    complete_run(shared_cluster, run_dir, "--max-steps", "6", "--workers", "2")
    resume = ["resume", str(run_dir)]
    wider = complete(shared_cluster, tmp_path, [*resume, "--width", "32"], code=2)
    assert "width from 16 to 32 (flag --width)" in wider
    assert read_summary(run_dir)["status"] == "completed"
    output = complete(shared_cluster, tmp_path, [*resume, "--max-steps", "9", "--workers", "1"])
    assert "changed: workers from 2 to 1 (flag --workers)" in output
    assert "global batch" not in output
    events = read_events(run_dir / "events.jsonl")
    (settings,) = of_kind(events, "settings")
    assert [change["name"] for change in settings["changes"]] == ["max_steps", "workers"]
    assert {step["lr"] for step in by_step(events)} == {1e-3}
    # A failure of the workers before their start leaves the outcome of a good run.
    summary = (run_dir / "summary.json").read_bytes()
    complete(shared_cluster, tmp_path, [*resume, "--early-stopping-metric", "f1", "--workers", "2"], code=2)
    assert (run_dir / "summary.json").read_bytes() == summary
    warnings = of_kind(read_events(run_dir / "events.jsonl"), "warning")
    assert "a resume failed before its first step: --early-stopping-metric 'f1'" in warnings[-1]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint_and_no_actor(
    shared_cluster: RayCluster, tmp_path: Path, number: int
) -> None:
    run_dir = tmp_path / "run"
    process = start_run(shared_cluster, run_dir, "--epochs", "100000", "--workers", "2")
    wait_for_steps(process, run_dir, 30)
    process.send_signal(number)
    output = finish_run(process, code=130, timeout=30)
    assert f"continue with: orchestrator resume {run_dir}" in output
    events = read_events(run_dir / "events.jsonl")
    assert of_kind(events, "checkpoint")[-1]["step"] == by_step(events)[-1]["step"]
    assert living_actors(shared_cluster) == []


# User errors

TASK = """
from orchestrator import Task, TensorData
import torch
from torch import nn

class Wrong(Task):
    def build_model(self):
        return nn.Linear(4, 2)

    def train_data(self):
        return TensorData(torch.randn(64, 4), torch.randint(2, (64,)))

    def loss(self, model, batch):
        return helper(model, batch)

def helper(model, batch):
    if batch[0].device.type == "cpu" and torch.distributed.is_initialized():
        raise KeyError("no such column")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.slow
def test_a_users_own_error_is_shown_once_and_not_retried(shared_cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    run_dir = tmp_path / "run"
    process = start_run(shared_cluster, run_dir, "--workers", "2", "--task", "own_task:Wrong")
    output = finish_run(process, code=2)
    message = next(line for line in output.splitlines() if line.startswith("orchestrator: "))
    assert "KeyError: 'no such column'" in message
    assert output.count("orchestrator: KeyError") == 1
    assert output.count("raise KeyError") == 1
    assert "Traceback" not in output
    assert read_summary(run_dir)["status"] == "failed"
    assert len(of_kind(read_events(run_dir / "events.jsonl"), "start")) == 1


# Jobs


@pytest.fixture
def job_cluster() -> Iterator[RayCluster]:
    """A head and two more raylets, with the dashboard that accepts jobs."""
    with local_cluster(cpus=2, dashboard=True) as cluster:
        cluster.add_node(cpus=1)
        cluster.add_node(cpus=1)
        cluster.environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{cluster.dashboard}"
        yield cluster


def submit_job(
    cluster: RayCluster, folder: Path, entry: list[str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Submit a job, once the cluster's agent is there to take it."""
    submit = [*RAY, "job", "submit", *options, "--working-dir", ".", "--", *entry]
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run(
            submit, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=300
        )
        if "No available agent" not in done.stderr + done.stdout or time.monotonic() > deadline:
            return done
        time.sleep(2)


@pytest.mark.slow
def test_jobs_from_a_fresh_clone(job_cluster: RayCluster, tmp_path: Path) -> None:
    """``ray job submit`` with two and with three workers: both complete, with the same losses."""
    root = Path(__file__).resolve().parents[3]
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(root), str(clone)], check=True)
    for workers in (2, 3):
        entry = command(tmp_path / f"run{workers}", "--max-steps", "60", "--workers", str(workers))
        done = submit_job(job_cluster, clone, entry)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "completed: 60 steps" in done.stdout
    assert losses(tmp_path / "run3") == pytest.approx(losses(tmp_path / "run2"), rel=1e-5)
    assert read_summary(tmp_path / "run3")["workers"] == 3


@pytest.mark.slow
def test_a_stopped_job_leaves_a_checkpoint_of_its_last_step(job_cluster: RayCluster, tmp_path: Path) -> None:
    """``ray job stop`` gives three seconds, enough for the workers to agree on a step and to save
    it."""
    run_dir = tmp_path / "run"
    root = Path(__file__).resolve().parents[3]
    entry = command(run_dir, "--epochs", "100000", "--workers", "2")
    submitted = submit_job(job_cluster, root, entry, "--no-wait", "--submission-id", "stopped")
    assert submitted.returncode == 0
    deadline = time.monotonic() + 120
    while steps_recorded(run_dir) < 40:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stop = [*RAY, "job", "stop", "stopped"]
    subprocess.run(stop, env=job_cluster.environment, check=True, capture_output=True, timeout=60)
    time.sleep(5)
    events = read_events(run_dir / "events.jsonl")
    assert of_kind(events, "end")[-1]["status"] == "stopped"
    assert of_kind(events, "checkpoint")[-1]["step"] == by_step(events)[-1]["step"]
    assert living_actors(job_cluster) in ([], ["JobSupervisor"])
