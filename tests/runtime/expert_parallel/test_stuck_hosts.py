"""Slow hosts are waited for, and hung ones are replaced: over gloo, with real processes.

``tests/gpu/test_recovery.py`` runs the same cases over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.faults.chaos_runs import FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultSchedule
from harness.faults.stuck_cases import CASES, STEPS, check_case, run_case
from harness.hosts.cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def job(shared_cluster: RayCluster) -> Job:
    return Job(STEPS, cluster=shared_cluster)


@pytest.fixture(scope="module")
def calm(job: Job, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run_with_faults(job, tmp_path_factory.mktemp("calm") / "run", FaultSchedule())


@pytest.mark.parametrize("name", CASES)
def test_only_hung_hosts_are_replaced(job: Job, calm: FinishedRun, tmp_path: Path, name: str) -> None:
    run = run_case(job, tmp_path, CASES[name])
    assert check_case(run, CASES[name], calm.events) == []
