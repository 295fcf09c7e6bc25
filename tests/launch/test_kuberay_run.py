"""The entry point of a RayJob for real: on a head without CPUs, as the manifest starts it, and two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.hosts.cluster import RayCluster, local_cluster
from harness.runs.cli_runs import QUIET, SIZES, read_summary
from orchestrator.launch.launch import LaunchOptions
from tests.launch.manifests import cluster_of, manifest


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_entry_point_trains_on_the_nodes_and_continues(tmp_path: Path) -> None:
    options = LaunchOptions("kuberay", workers=2, gpus_per_node=0, run_dir=tmp_path / "runs" / "mine")
    content = manifest(options, *SIZES, *QUIET, "--max-steps", "6")
    cpus = int(cluster_of(content)["headGroupSpec"]["rayStartParams"]["num-cpus"])
    (tmp_path / "runs").mkdir()
    with local_cluster(cpus) as cluster:
        for _ in range(cluster_of(content)["workerGroupSpecs"][0]["replicas"]):
            cluster.add_node(cpus=1)
        entry_point = content["spec"]["entrypoint"]
        submit(cluster, entry_point)
        summary = read_summary(tmp_path / "runs" / "mine")
        assert (summary["status"], summary["steps"], summary["workers"]) == ("completed", 6, 2)
        # A further attempt of the job has the same entry point; here with steps left to do.
        assert "resumed at step 6" in submit(cluster, entry_point.replace("--max-steps 6", "--max-steps 8"))
    assert read_summary(tmp_path / "runs" / "mine")["steps"] == 8


def submit(cluster: RayCluster, entry_point: str) -> str:
    """Run an entry point as the job of a cluster does: by a shell, with the address in the environment."""
    environment = cluster.environment | {
        "RAY_ADDRESS": cluster.address,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["/bin/sh", "-c", entry_point]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
