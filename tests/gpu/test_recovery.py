"""Expert hosts on a GPU that are killed: what CUDA held is given back, and the run goes on as if nothing had happened. They share the one
GPU, over gloo; NCCL refuses two hosts on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos_runs import Job, disturbed
from tests.support.cluster import Cluster, cluster
from tests.support.faults import Schedule
from tests.support.run_checks import recoveries, told

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(500)]
STEPS = 60


@pytest.fixture
def three_on_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A node that says that it has three GPUs, where every process sees the same one."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    with cluster(cpus=6, gpus=3) as made:
        yield made


def test_killed_hosts_cost_nothing_on_a_gpu(three_on_one: Cluster, tmp_path: Path) -> None:
    job = Job(
        STEPS, hosts=2, spares=1, here=three_on_one, extra=("--backend", "gloo", "--gpu-mode", "multi_gpu")
    )
    calm = disturbed(job, tmp_path / "calm" / "run", Schedule())
    assert calm.wrong(calm, STEPS) == []
    schedule = Schedule().kill(1, step=23).kill(0, step=37, phase="exchange").kill((0, 1), step=48)
    ended = disturbed(job, tmp_path / "killed" / "run", schedule)
    assert ended.wrong(calm, STEPS) == []
    assert (len(ended.fired), len(recoveries(ended.events))) == (4, 3)
    assert [recovery["source"] for recovery in recoveries(ended.events)] == ["memory"] * 3
    assert told(ended.run_dir)["device"] == told(calm.run_dir)["device"] != "cpu"
