"""Kills where the dense part is sharded: the hosts continue from the shards in their snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults.chaos_runs import SAMPLES, FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultFolder, FaultSchedule
from harness.faults.run_checks import check_losses, check_samples, check_steps, recoveries
from harness.hosts.cluster import local_cluster
from harness.runs.cli_runs import read_summary
from tests.runtime.expert_parallel.conftest import STEPS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
TOLERANCE = 1e-5
"""Of the losses where hosts sum in another order."""


def sharded(job: Job, form: str = "zero3") -> Job:
    return replace(job, extra=(*job.extra, "--sharding", form))


def sources(run: FinishedRun) -> list[str]:
    return [event["source"] for event in recoveries(run.events)]


@pytest.mark.extended
def test_a_lost_host_comes_back_with_its_shards(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    """The losses are those of the undisturbed run with a whole dense part."""
    run = run_with_faults(sharded(job), tmp_path / "run", FaultSchedule().kill(1, step=33))
    assert run.exit_code == 0, run.output
    assert check_steps(run.events, STEPS) == []
    assert check_losses(run.events, calm.events, TOLERANCE) == []
    assert (sources(run), run.leftovers, len(run.fired)) == (["memory"], [], 1)


@pytest.mark.extended
@pytest.mark.parametrize("form", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_kills_leave_the_bits_of_the_undisturbed_run(job: Job, tmp_path: Path, form: str) -> None:
    """The main host, then another one while it takes a snapshot, then two at once."""
    calm = run_with_faults(replace(sharded(job, form), spares=0), tmp_path / "calm", FaultSchedule())
    schedule = FaultSchedule().kill(0, step=25).kill(2, step=45, phase="snapshot").kill((0, 1), step=65)
    run = run_with_faults(sharded(job, form), tmp_path / "run", schedule)
    assert run.problems(calm, STEPS) == []
    assert len(run.fired) == 4
    assert set(sources(run)) == {"memory"}


@pytest.mark.extended
def test_fewer_hosts_divide_the_shards_of_a_lost_node(tmp_path: Path) -> None:
    """Its snapshot comes from the backup on the other node."""
    with local_cluster(cpus=2) as cluster:
        cluster.add_node(cpus=1)
        job = sharded(Job(STEPS, spares=0, cluster=cluster))
        calm = run_with_faults(job, tmp_path / "calm", FaultSchedule())
        run = run_with_faults(job, tmp_path / "run", FaultSchedule().lose("raylet", 33))
    assert run.exit_code == 0, run.output
    assert check_steps(run.events, STEPS) == []
    assert check_losses(run.events, calm.events, TOLERANCE) == []
    assert check_samples(run.events, FaultFolder.of_run(run.run_dir), SAMPLES) == []
    assert (sources(run), run.leftovers) == (["memory"], [])
    assert read_summary(run.run_dir)["workers"] == 2
