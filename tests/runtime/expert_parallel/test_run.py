"""Expert parallel on Ray actors, end to end by the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from harness.faults.chaos_runs import FinishedRun
from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import (
    complete_run,
    finish_run,
    kill_worker,
    living_actors,
    losses,
    read_summary,
    single_process_losses,
    start_run,
    wait_for_steps,
)
from orchestrator.record.files.reading import of_kind, read_events
from tests.runtime.expert_parallel.conftest import FIVE_EXPERTS, STEPS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
HOSTS = ["--parallel-strategy", "expert_parallel", "--workers"]
FIFTY_STEPS = ["--max-steps", "50", "--global-batch-size", "96"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    return single_process_losses(tmp_path_factory.mktemp("alone") / "run", *FIVE_EXPERTS, *FIFTY_STEPS)


@pytest.fixture(scope="module")
def expected_of_calm(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, with the settings of the run on three hosts."""
    length = shlex.split(f"--max-steps {STEPS} --epochs 9 --global-batch-size 96 --warmup-steps 0")
    folder = tmp_path_factory.mktemp("alone")
    return single_process_losses(folder / "run", *FIVE_EXPERTS, *length, "--deterministic")


def test_five_experts_of_four_sizes_train_as_in_one_process(
    shared_cluster: RayCluster, calm: FinishedRun, expected_of_calm: list[float]
) -> None:
    check_run(calm.run_dir, calm.output, expected_of_calm, 3)
    assert living_actors(shared_cluster) == []


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_fewer_hosts_train_as_one_process(
    shared_cluster: RayCluster, tmp_path: Path, expected: list[float], hosts: int
) -> None:
    run_dir = tmp_path / "run"
    flags = [*FIVE_EXPERTS, *FIFTY_STEPS, *HOSTS, str(hosts), "--plots", "end"]
    check_run(run_dir, complete_run(shared_cluster, run_dir, *flags), expected, hosts)
    assert living_actors(shared_cluster) == []


def check_run(run_dir: Path, output: str, expected: list[float], hosts: int) -> None:
    assert losses(run_dir) == pytest.approx(expected, rel=1e-5)
    summary = read_summary(run_dir)
    assert (summary["status"], summary["strategy"]) == ("completed", "expert_parallel")
    assert summary["workers"] == hosts
    assert not re.search(r"ray\.|ExpertHost|Traceback|WARNING", output), output
    if hosts > 1:
        assert f"5 experts on {hosts} hosts" in output
        assert summary["imbalance"] >= 1.0
        assert summary["exchange_bytes_per_step"] > 0
        assert (run_dir / "expert_device_distribution.png").stat().st_size > 10_000
    assert (run_dir / "expert_activations.png").is_file()


@pytest.mark.slow
def test_the_text_task_on_one_two_and_three_hosts(shared_cluster: RayCluster, tmp_path: Path) -> None:
    length = shlex.split(
        "--task text --sequence-length 32 --max-steps 50 --global-batch-size 24 --log-every 1"
    )
    expected = single_process_losses(tmp_path / "alone", *FIVE_EXPERTS, *length)
    for hosts in (1, 2, 3):
        run_dir = tmp_path / f"hosts-{hosts}"
        complete_run(shared_cluster, run_dir, *FIVE_EXPERTS, *length, *HOSTS, str(hosts))
        assert losses(run_dir) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_gate_on_the_main_host(shared_cluster: RayCluster, tmp_path: Path, expected: list[float]) -> None:
    run_dir = tmp_path / "run"
    flags = [*FIVE_EXPERTS, *FIFTY_STEPS, *HOSTS, "3", "--gate", "primary"]
    complete_run(shared_cluster, run_dir, *flags)
    assert losses(run_dir) == pytest.approx(expected, rel=1e-5)


def test_no_ray_call_is_made_inside_a_step(calm: FinishedRun) -> None:
    """Each host counts its calls into Ray from the first loss on.

    Between segments the driver calls the host, not the host the driver: over all steps, their snapshots and
    their evaluation a host makes no call to Ray, and neither puts objects into its store nor gets any."""
    counts = [json.loads(path.read_text()) for path in sorted(calm.run_dir.glob("calls-*.json"))]
    assert len(counts) == 3
    for of_host in counts:
        assert of_host["losses"] >= STEPS
        assert of_host["calls"] == {}


@pytest.mark.slow
def test_a_killed_host_costs_some_steps_and_nothing_else(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    length = shlex.split("--max-steps 300 --epochs 100 --checkpoint-every 10")
    process = start_run(shared_cluster, run_dir, *length, *HOSTS, "2")
    wait_for_steps(process, run_dir, 40)
    kill_worker(run_dir, 0)
    output = finish_run(process)
    expected = single_process_losses(tmp_path / "alone", *length)
    assert losses(run_dir)[:50] == pytest.approx(expected[:50], rel=1e-5)
    assert "host 0 was lost" in output
    summary = read_summary(run_dir)
    assert (summary["status"], summary["workers"]) == ("completed", 2)
    assert (summary["failures"], summary["recoveries"]) == (1, 1)
    assert living_actors(shared_cluster) == []


@pytest.mark.slow
def test_an_interrupt_leaves_a_checkpoint(shared_cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(shared_cluster, run_dir, *HOSTS, "2", "--epochs", "1000")
    wait_for_steps(process, run_dir, 20)
    os.kill(process.pid, signal.SIGINT)
    finish_run(process, code=130)
    (end,) = of_kind(read_events(run_dir / "events.jsonl"), "end")
    assert end["status"] == "stopped"
    assert (run_dir / "checkpoints" / f"step_{end['steps']:08d}").is_dir()
    assert living_actors(shared_cluster) == []
