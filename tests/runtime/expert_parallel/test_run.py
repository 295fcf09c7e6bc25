"""Expert parallel on Ray actors, end to end by the command line: on a cluster that runs already, disturbed and not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from orchestrator.record.events import of_kind, read_events
from tests.support import counting_task
from tests.support.cli_runs import actors, alone, finish, kill_worker, losses, start, summary, wait_for_steps
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
FIVE = [
    "--experts",
    "5",
    "--expert-hidden-size",
    "32",
    "64",
    "64",
    "128",
    "256",
    "--width",
    "64",
    "--layers",
    "2",
]
HOSTS = ["--parallel-strategy", "expert_parallel", "--workers"]
FIFTY = ["--max-steps", "50", "--global-batch-size", "96"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    return alone(tmp_path_factory.mktemp("alone") / "run", *FIVE, *FIFTY)


@pytest.mark.parametrize(
    "hosts", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_digits_with_five_experts_of_four_sizes(
    shared_cluster: Cluster, tmp_path: Path, expected: list[float], hosts: int
) -> None:
    run_dir = tmp_path / "run"
    output = finish(start(shared_cluster, run_dir, *FIVE, *FIFTY, *HOSTS, str(hosts)))
    assert losses(run_dir) == pytest.approx(expected, rel=1e-5)
    told = summary(run_dir)
    assert (told["status"], told["strategy"], told["workers"]) == ("completed", "expert_parallel", hosts)
    assert not re.search(r"ray\.|ExpertHost|Traceback|WARNING", output), output
    if hosts > 1:
        assert f"5 experts on {hosts} hosts" in output
        assert told["imbalance"] >= 1.0
        assert told["exchange_bytes_per_step"] > 0
        assert (run_dir / "expert_device_distribution.png").stat().st_size > 10_000
    assert (run_dir / "expert_activations.png").is_file()
    assert actors(shared_cluster) == []


@pytest.mark.slow
def test_text_on_one_two_and_three_hosts(shared_cluster: Cluster, tmp_path: Path) -> None:
    text = [
        "--task",
        "text",
        *FIVE,
        "--context-length",
        "32",
        "--max-steps",
        "50",
        "--global-batch-size",
        "24",
        "--log-every",
        "1",
    ]
    expected = alone(tmp_path / "alone", *text)
    for hosts in (1, 2, 3):
        finish(start(shared_cluster, tmp_path / f"hosts-{hosts}", *text, *HOSTS, str(hosts)))
        assert losses(tmp_path / f"hosts-{hosts}") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_gate_on_the_first_host(shared_cluster: Cluster, tmp_path: Path, expected: list[float]) -> None:
    finish(start(shared_cluster, tmp_path / "run", *FIVE, *FIFTY, *HOSTS, "3", "--gate", "primary"))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_no_ray_call_inside_a_step(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Each host counts its calls into Ray from the first loss on. Between segments the driver calls the host, not the host the
    driver: over 60 steps and their evaluation nothing was asked of Ray, and nothing put into or taken from its store."""
    run_dir = tmp_path / "run"
    shutil.copy(counting_task.__file__, tmp_path / "counted.py")
    finish(start(shared_cluster, run_dir, *HOSTS, "2", "--task", "counted:Counting", "--max-steps", "60"))
    counts = [json.loads(path.read_text()) for path in sorted(run_dir.glob("calls-*.json"))]
    assert len(counts) == 2
    for found in counts:
        assert found["losses"] >= 60
        assert found["calls"] == {}


@pytest.mark.slow
def test_a_killed_host_costs_some_steps_and_nothing_else(shared_cluster: Cluster, tmp_path: Path) -> None:
    run_dir, length = tmp_path / "run", ["--max-steps", "300", "--epochs", "100", "--checkpoint-every", "10"]
    process = start(shared_cluster, run_dir, *length, *HOSTS, "2")
    wait_for_steps(process, run_dir, 40)
    kill_worker(run_dir, 0)
    output = finish(process)
    expected = alone(tmp_path / "alone", *length)
    assert losses(run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)
    assert "worker 0 was lost" in output or "worker 0 lost" in output
    told = summary(run_dir)
    assert (told["status"], told["workers"], told["failures"], told["recoveries"]) == ("completed", 2, 1, 1)
    assert actors(shared_cluster) == []


@pytest.mark.slow
def test_an_interrupt_leaves_a_checkpoint(shared_cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(shared_cluster, run_dir, *HOSTS, "2", "--epochs", "1000")
    wait_for_steps(process, run_dir, 20)
    os.kill(process.pid, signal.SIGINT)
    finish(process, code=130)
    (end,) = of_kind(read_events(run_dir / "events.jsonl"), "end")
    assert end["status"] == "stopped"
    assert (run_dir / "checkpoints" / f"step_{end['steps']:08d}").is_dir()
    assert actors(shared_cluster) == []
