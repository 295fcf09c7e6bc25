"""Killed expert hosts on a GPU: CUDA's memory is freed, and the run continues with the same
results.

The hosts share one GPU and communicate over gloo: NCCL refuses two ranks on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos_runs import Job, run_with_faults
from tests.support.cli_runs import read_summary
from tests.support.cluster import RayCluster, local_cluster
from tests.support.faults import FaultSchedule
from tests.support.run_checks import recoveries

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(500)]
STEPS = 60


@pytest.fixture
def cluster_with_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """A node that declares three GPUs, where every process sees the same one."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    with local_cluster(cpus=6, gpus=3) as cluster:
        yield cluster


def test_killed_hosts_cost_nothing_on_a_gpu(cluster_with_shared_gpu: RayCluster, tmp_path: Path) -> None:
    flags = ("--backend", "gloo", "--gpu-mode", "multi_gpu")
    job = Job(STEPS, hosts=2, spares=1, cluster=cluster_with_shared_gpu, extra=flags)
    calm = run_with_faults(job, tmp_path / "calm" / "run", FaultSchedule())
    assert calm.problems(calm, STEPS) == []
    schedule = FaultSchedule().kill(1, step=23).kill(0, step=37, phase="exchange").kill((0, 1), step=48)
    run = run_with_faults(job, tmp_path / "killed" / "run", schedule)
    assert run.problems(calm, STEPS) == []
    assert (len(run.fired), len(recoveries(run.events))) == (4, 3)
    assert [recovery["source"] for recovery in recoveries(run.events)] == ["memory"] * 3
    assert read_summary(run.run_dir)["device"] == read_summary(calm.run_dir)["device"] != "cpu"
