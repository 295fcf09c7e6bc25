"""One undisturbed run on three hosts, for the tests of whole runs and of runs with faults."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from harness.faults.chaos_runs import FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultSchedule
from harness.hosts.cluster import RayCluster

STEPS = 90
FIVE_EXPERTS = shlex.split("--experts 5 --expert-hidden-size 32 64 64 128 256 --width 64 --layers 2")


@pytest.fixture(scope="session")
def job(shared_cluster: RayCluster) -> Job:
    return Job(STEPS, cluster=shared_cluster, extra=tuple(FIVE_EXPERTS))


@pytest.fixture(scope="session")
def calm(job: Job, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The undisturbed run, with calls into Ray counted. It needs no spare."""
    counting = ("--task", "harness.runs.counting_task:CountingFaultyDigits", "--plots", "end")
    run_dir = tmp_path_factory.mktemp("calm") / "run"
    run = run_with_faults(replace(job, spares=0, extra=(*job.extra, *counting)), run_dir, FaultSchedule())
    assert run.problems(run, STEPS) == []
    return run
