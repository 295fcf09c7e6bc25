"""Runs with --reproducible on Ray that lose workers have the bits of one undisturbed process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import ray

from harness.faults.run_checks import recoveries
from harness.hosts.cluster import RayCluster, connected, local_cluster
from harness.hosts.idle_hosts import wait_until
from harness.runs.bits import checkpoints_of, first_difference
from harness.runs.cli_runs import (
    complete_run,
    finish_run,
    kill_worker,
    read_summary,
    start_run,
    wait_for_steps,
)
from orchestrator.record.files.reading import read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
EXACT = shlex.split("--reproducible --batch-size 7 --log-every 1 --warmup-steps 0 --checkpoint-every 20")
ENDLESS = ["--epochs", "100000", "--evaluate-every", "100000", "--keep", "3"]
SEVEN_EXPERTS = shlex.split("--experts 7 --expert-hidden-size 8 16 8 12 8 24 8 --layers 2")


def wait_for_workers(process: subprocess.Popen[str], run_dir: Path, number: int, timeout: float) -> None:
    """Wait until the run has recovered on so many hosts."""
    deadline = time.monotonic() + timeout
    while not any(event["workers"] == number for event in recoveries(read_events(run_dir / "events.jsonl"))):
        assert process.poll() is None, f"ended too early:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, f"did not continue on {number} hosts within {timeout} s"
        time.sleep(0.2)


def control_store_seconds(cluster: RayCluster) -> float:
    """Return the CPU time of the head node's control store."""
    (store,) = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "gcs_server" and str(cluster.folder) in " ".join(process.info["cmdline"])
    ]
    return store.cpu_times().user


def wait_until_ray_knows(cluster: RayCluster, nodes: int) -> None:
    """Wait until Ray has noticed a lost node."""
    with connected(cluster):
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == nodes, timeout_s=120)


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.slow), "zero3"])
def test_hosts_that_are_lost_and_join_have_the_bits_of_one_process(tmp_path: Path, sharding: str) -> None:
    """Four hosts, three after a node is killed, four when there is another one, and a killed host among them.

    All continue from snapshots, with the dense part in shards too. The run is ended by an interrupt: one
    process repeats as many steps."""
    run_dir = tmp_path / "run"
    with local_cluster(cpus=3) as cluster:
        lost = cluster.add_node(cpus=1)
        hosts = ["--parallel-strategy", "expert_parallel", "--workers", "4", "--max-steps", "100000"]
        hosts += ["--sharding", sharding]
        process = start_run(cluster, run_dir, *SEVEN_EXPERTS, *EXACT, *ENDLESS, *hosts)
        wait_for_steps(process, run_dir, 30, timeout=300)
        before = control_store_seconds(cluster)
        cluster.kill_node(lost)
        wait_for_workers(process, run_dir, 3, timeout=300)
        wait_until_ray_knows(cluster, nodes=1)
        wait_for_steps(process, run_dir, 10)
        # Ray's control store would try without a pause to place the lost host, and answer nobody else.
        assert control_store_seconds(cluster) - before < 1.0
        cluster.add_node(cpus=1)
        wait_for_workers(process, run_dir, 4, timeout=600)
        wait_for_steps(process, run_dir, 10, timeout=300)
        kill_worker(run_dir, 1)
        wait_for_steps(process, run_dir, 30, timeout=300)
        os.kill(process.pid, signal.SIGINT)
        finish_run(process, code=130)
    recovered = recoveries(read_events(run_dir / "events.jsonl"))
    assert {event["source"] for event in recovered} == {"memory"}
    steps = max(checkpoints_of(run_dir))
    length = ["--max-steps", str(steps)]
    complete_run(None, tmp_path / "one", *SEVEN_EXPERTS, *EXACT, *ENDLESS, *length)
    assert first_difference(run_dir, tmp_path / "one") is None


@pytest.mark.extended
def test_a_killed_data_parallel_worker_leaves_the_bits_of_one_process(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    length = [*EXACT, *ENDLESS, "--max-steps", "120"]
    process = start_run(shared_cluster, tmp_path / "run", *length, "--workers", "2")
    wait_for_steps(process, tmp_path / "run", 40, timeout=300)
    kill_worker(tmp_path / "run", 1)
    finish_run(process)
    assert read_summary(tmp_path / "run")["recoveries"] == 1
    complete_run(None, tmp_path / "one", *length)
    assert first_difference(tmp_path / "run", tmp_path / "one") is None
