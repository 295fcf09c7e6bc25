"""Data parallel through Ray Train, end to end: on a cluster that runs already, with kills, losses, signals and mistakes."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import OutOfMemory, ResourceError, TaskFailed, TrainingFailed
from orchestrator.record.events import by_step, of_kind, read_events
from tests.support.cli_runs import (
    QUIET,
    SIZES,
    actors,
    alone,
    finish,
    kill_worker,
    losses,
    start,
    steps_recorded,
    summary,
    wait_for_steps,
)
from tests.support.cluster import RAY, Cluster, cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_a_killed_worker_costs_some_steps_and_nothing_else(shared_cluster: Cluster, tmp_path: Path) -> None:
    """The run joins a cluster, loses a worker to ``kill -9``, begins again from its checkpoint, and its losses are those of
    one process that was never disturbed. The cluster is left as it was found."""
    run_dir, length = tmp_path / "run", ["--max-steps", "120", "--epochs", "100", "--checkpoint-every", "10"]
    process = start(shared_cluster, run_dir, *length, "--workers", "2")
    wait_for_steps(process, run_dir, 40)
    kill_worker(run_dir, 1)
    output = finish(process)
    expected = alone(tmp_path / "alone", *length)
    assert losses(run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)
    assert losses(run_dir) == pytest.approx(expected, rel=2e-2)
    assert "worker 1 was lost" in output or "worker 1 lost" in output
    told = summary(run_dir)
    assert (told["status"], told["workers"], told["failures"], told["recoveries"]) == ("completed", 2, 1, 1)
    (recovery,) = of_kind(read_events(run_dir / "events.jsonl"), "recovery")
    assert recovery["total_seconds"] > recovery["restore_seconds"] > 0
    assert not re.search(r"ray\.|\(RayTrainWorker|Traceback|WARNING", output), output
    assert actors(shared_cluster) == []


def test_more_than_the_cluster_will_ever_have(shared_cluster: Cluster, tmp_path: Path) -> None:
    output = finish(start(shared_cluster, tmp_path / "run", "--workers", "9"), code=3, timeout=60)
    assert "--workers 9" in output
    assert "4 CPUs" in output
    assert len(output.strip().splitlines()) <= 4


@pytest.mark.slow
def test_two_workers_restarted_are_the_same_to_the_bit(shared_cluster: Cluster, tmp_path: Path) -> None:
    length = [
        "--max-steps",
        "300",
        "--epochs",
        "100",
        "--checkpoint-every",
        "10",
        "--workers",
        "2",
        "--deterministic",
    ]
    finish(start(shared_cluster, tmp_path / "calm", *length))
    process = start(shared_cluster, tmp_path / "run", *length, "--max-failures", "5")
    for rank in (0, 1):
        wait_for_steps(process, tmp_path / "run", 45)
        kill_worker(tmp_path / "run", rank)
    finish(process)
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Random workers of three, one after the other: completed, losses as of a run that was never disturbed."""
    length = [
        "--max-steps",
        "2000",
        "--epochs",
        "1000",
        "--checkpoint-every",
        "20",
        "--workers",
        "3",
        "--deterministic",
    ]
    run_dir, generator = tmp_path / "run", random.Random(3)
    process = start(shared_cluster, run_dir, *length, "--max-failures", "20")
    for _ in range(10):
        wait_for_steps(process, run_dir, generator.randrange(30, 80))
        kill_worker(run_dir, generator.randrange(3))
    finish(process, timeout=900)
    finish(start(shared_cluster, tmp_path / "calm", *length), timeout=900)
    told = summary(run_dir)
    assert (told["status"], told["steps"], told["failures"], told["recoveries"]) == (
        "completed",
        2000,
        10,
        10,
    )
    assert losses(run_dir)[:50] == pytest.approx(losses(tmp_path / "calm")[:50], rel=1e-5)


@pytest.mark.slow
def test_a_lost_node_leaves_the_rest_to_go_on(tmp_path: Path) -> None:
    with cluster(cpus=1) as here:
        lost = here.add_node(cpus=1)
        here.add_node(cpus=1)
        run_dir = tmp_path / "run"
        length = ["--max-steps", "600", "--epochs", "100", "--checkpoint-every", "10"]
        process = start(here, run_dir, *length, "--workers", "3")
        wait_for_steps(process, run_dir, 40)
        here.kill_node(lost)
        finish(process)
    told = summary(run_dir)
    assert (told["status"], told["workers"], told["steps"]) == ("completed", 2, 600)
    assert of_kind(read_events(run_dir / "events.jsonl"), "recovery")[0]["workers_before"] == 3
    expected = alone(tmp_path / "alone", *length)
    assert losses(run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)


@pytest.mark.slow
def test_text_end_to_end(shared_cluster: Cluster, tmp_path: Path) -> None:
    length = ["--task", "text", "--max-steps", "40", "--context-length", "32"]
    finish(start(shared_cluster, tmp_path / "run", *length, "--workers", "3"))
    assert losses(tmp_path / "run") == pytest.approx(alone(tmp_path / "alone", *length), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint_and_no_actor(
    shared_cluster: Cluster, tmp_path: Path, number: int
) -> None:
    run_dir = tmp_path / "run"
    process = start(shared_cluster, run_dir, "--epochs", "100000", "--workers", "2")
    wait_for_steps(process, run_dir, 30)
    begun = time.monotonic()
    process.send_signal(number)
    output = finish(process, code=130, timeout=30)
    assert "continue with --resume auto" in output
    events = read_events(run_dir / "events.jsonl")
    assert of_kind(events, "checkpoint")[-1]["step"] == by_step(events)[-1]["step"]
    assert actors(shared_cluster) == []
    print(f"ended {time.monotonic() - begun:.1f} s after the signal")  # noqa: T201


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
def test_a_users_own_error_is_shown_once_and_not_retried(shared_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    run_dir = tmp_path / "run"
    process = start(shared_cluster, run_dir, "--workers", "2", "--task", "own_task:Wrong")
    output = finish(process, code=2)
    lines = output.strip().splitlines()
    told = next(n for n, line in enumerate(lines) if line.startswith("orchestrator: "))
    assert "KeyError: 'no such column'" in lines[told]
    assert output.count("orchestrator: KeyError") == 1
    assert output.count("raise KeyError") == 1
    assert "Traceback" not in output
    assert summary(run_dir)["status"] == "failed"
    assert len(of_kind(read_events(run_dir / "events.jsonl"), "start")) == 1


@pytest.fixture
def with_jobs() -> Iterator[Cluster]:
    with cluster(cpus=2, dashboard=True) as here:
        here.add_node(cpus=1)
        here.add_node(cpus=1)
        yield here


@pytest.mark.slow
def test_jobs_from_a_fresh_clone(with_jobs: Cluster, tmp_path: Path) -> None:
    """``ray job submit`` on a head and two more raylets, tokens on: two and three workers, both completed, the same losses."""
    root, clone = Path(__file__).resolve().parents[3], tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(root), str(clone)], check=True)
    environment = with_jobs.environment | {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{with_jobs.dashboard}"
    }
    for workers in (2, 3):
        entry = [
            sys.executable,
            "-m",
            "orchestrator",
            "train",
            "--run-dir",
            str(tmp_path / f"run{workers}"),
            *SIZES,
            *QUIET,
        ]
        entry += ["--max-steps", "60", "--workers", str(workers)]
        submit = [*RAY, "job", "submit", "--working-dir", ".", "--", *entry]
        done = submitted(submit, clone, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "completed: 60 steps" in done.stdout
    assert losses(tmp_path / "run3") == pytest.approx(losses(tmp_path / "run2"), rel=1e-5)
    assert summary(tmp_path / "run3")["workers"] == 3


@pytest.mark.slow
def test_a_stopped_job_leaves_a_checkpoint_of_its_last_step(with_jobs: Cluster, tmp_path: Path) -> None:
    """``ray job stop`` gives three seconds: enough for the workers to agree, and to save."""
    environment = with_jobs.environment | {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{with_jobs.dashboard}"
    }
    run_dir, root = tmp_path / "run", Path(__file__).resolve().parents[3]
    entry = [
        sys.executable,
        "-m",
        "orchestrator",
        "train",
        "--run-dir",
        str(run_dir),
        *SIZES,
        *QUIET,
        "--epochs",
        "100000",
        "--workers",
        "2",
    ]
    submit = [
        *RAY,
        "job",
        "submit",
        "--no-wait",
        "--submission-id",
        "stopped",
        "--working-dir",
        ".",
        "--",
        *entry,
    ]
    assert submitted(submit, root, environment).returncode == 0
    deadline = time.monotonic() + 120
    while steps_recorded(run_dir) < 40:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    subprocess.run(
        [*RAY, "job", "stop", "stopped"], env=environment, check=True, capture_output=True, timeout=60
    )
    time.sleep(5)
    events = read_events(run_dir / "events.jsonl")
    assert of_kind(events, "end")[-1]["status"] == "stopped"
    assert of_kind(events, "checkpoint")[-1]["step"] == by_step(events)[-1]["step"]
    assert actors(with_jobs) in ([], ["JobSupervisor"])


def submitted(
    submit: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """A job, once the cluster's agent is there to take it."""
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run(
            submit, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        if "No available agent" not in done.stderr + done.stdout or time.monotonic() > deadline:
            return done
        time.sleep(2)


def wrapped(error: Exception) -> Any:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    return UserExceptionWithTraceback(error, f"Traceback …\n{type(error).__name__}: {error}")


def test_the_cause_among_the_workers_errors() -> None:
    from ray.exceptions import ActorDiedError
    from ray.train import WorkerGroupError

    from orchestrator.runtime.data_parallel.fit import ended_by
    from orchestrator.runtime.driver import final
    from orchestrator.runtime.recovery import Failure, GiveUp

    def failure(raised: dict[int, Any]) -> Failure:
        found = ended_by(WorkerGroupError("x", raised)).failure
        assert found is not None
        return found

    def told(raised: dict[int, Any], reason: str = "gave up") -> BaseException:
        ended = ended_by(WorkerGroupError("x", raised))
        assert ended.failure is not None
        return final(ended.failure, ended.error, GiveUp(reason))

    reset = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    lost = failure({0: wrapped(reset), 1: ActorDiedError()})
    assert (lost.kind, lost.rank) == ("worker", 1)
    assert failure({0: wrapped(reset)}).kind == "communication"
    exhausted = {0: wrapped(reset), 2: wrapped(OutOfMemory("worker 2 ran out", 8))}
    assert (failure(exhausted).kind, failure(exhausted).micro_batch) == ("memory", 8)
    mine = {
        0: wrapped(TaskFailed("KeyError: 'a'")),
        1: wrapped(TaskFailed("KeyError: 'a'")),
        2: wrapped(reset),
    }
    assert failure(mine).kind == "error"
    assert isinstance(told(mine), TaskFailed)
    assert str(told(mine)) == "KeyError: 'a'"
    bug = told({1: wrapped(ZeroDivisionError("division by zero"))})
    assert isinstance(bug, TrainingFailed)
    assert "Traceback" in str(bug)
    assert isinstance(told({1: ActorDiedError()}), TrainingFailed)
    assert isinstance(told(exhausted), ResourceError)
