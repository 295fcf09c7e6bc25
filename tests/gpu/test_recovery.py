"""Killed and hung expert hosts on GPUs: CUDA's memory is freed, survivors keep their processes, and the
run continues with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.chaos_runs import FinishedRun, Job, run_with_faults
from tests.support.cli_runs import read_summary
from tests.support.cluster import local_cluster
from tests.support.faults import FaultSchedule
from tests.support.gpu_ranks import skip_without
from tests.support.run_checks import recoveries
from tests.support.stuck_cases import CASES, check_case, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(500)]
KILL_STEPS = 60
GPUS = 3


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Two hosts and a spare. On a machine with fewer GPUs every process sees the same one."""
    skip_without(request.param, GPUS)
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < GPUS:
            patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        with local_cluster(cpus=6, gpus=GPUS) as cluster:
            flags = ("--backend", request.param, "--gpu-mode", "multi_gpu")
            yield Job(KILL_STEPS, hosts=2, spares=1, cluster=cluster, extra=flags)


@pytest.fixture(scope="module")
def calm(job: Job, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = run_with_faults(job, tmp_path_factory.mktemp("calm") / "run", FaultSchedule())
    assert run.problems(run, KILL_STEPS) == []
    return run


def test_killed_hosts_cost_nothing_on_a_gpu(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    schedule = FaultSchedule().kill(1, step=23).kill(0, step=37, phase="exchange").kill((0, 1), step=48)
    run = run_with_faults(job, tmp_path / "run", schedule)
    assert run.problems(calm, KILL_STEPS) == []
    assert (len(run.fired), len(recoveries(run.events))) == (4, 3)
    assert [recovery["source"] for recovery in recoveries(run.events)] == ["memory"] * 3
    assert read_summary(run.run_dir)["device"] == read_summary(calm.run_dir)["device"] != "cpu"


@pytest.mark.parametrize("name", CASES)
def test_only_hung_hosts_are_replaced(job: Job, calm: FinishedRun, tmp_path: Path, name: str) -> None:
    run = run_case(job, tmp_path, CASES[name])
    assert check_case(run, CASES[name], calm.events) == []
