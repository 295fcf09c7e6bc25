"""Hosts that are killed while experts change: the run continues from before or after the change, and ends
with the results of the undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults.chaos_runs import EVOLVING, FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import EVOLUTION_PHASES, FaultSchedule, Phase
from harness.faults.run_checks import check_experts, recoveries
from harness.hosts.cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
STEPS = 110
FIRST_STEPS = {"measure": 10, "before move": 10, "after move": 20, "gate": 50, "validate": 50, "undo": 50}
"""Steps before the first changes of each kind."""


@pytest.fixture(scope="module")
def job(shared_cluster: RayCluster) -> Job:
    return Job(STEPS, extra=tuple(EVOLVING), cluster=shared_cluster)


@pytest.fixture(scope="module")
def calm(job: Job, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The undisturbed run. Its experts change in all ways."""
    run = run_with_faults(replace(job, spares=0), tmp_path_factory.mktemp("calm") / "run", FaultSchedule())
    assert run.problems(run, STEPS) == []
    changes = {event["change"] for event in run.events if event["event"] == "expert"}
    assert changes >= {"born", "warmed", "merged", "moved", "copied", "undone"}
    return run


def run_unharmed(job: Job, calm: FinishedRun, folder: Path, schedule: FaultSchedule) -> FinishedRun:
    """Run under a schedule. All its faults happen, and the result is that of the undisturbed run."""
    run = run_with_faults(job, folder / "run", schedule)
    assert run.problems(calm, STEPS) == []
    assert check_experts(run.events, calm.events) == []
    assert len(run.fired) == len(schedule.faults), run.fired
    return run


def kills(rank: int) -> FaultSchedule:
    """Kill one host in each phase of a change."""
    schedule = FaultSchedule()
    for phase in EVOLUTION_PHASES:
        schedule = schedule.kill(rank, FIRST_STEPS[phase], phase)
    return schedule


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_kills_in_each_phase_of_a_change(job: Job, calm: FinishedRun, tmp_path: Path, rank: int) -> None:
    run = run_unharmed(job, calm, tmp_path, kills(rank))
    assert {fault.phase for fault in run.fired} == set(EVOLUTION_PHASES)
    assert len(recoveries(run.events)) == len(EVOLUTION_PHASES)


@pytest.mark.slow
def test_kills_while_the_dense_part_is_sharded(job: Job, tmp_path: Path) -> None:
    sharded = replace(job, extra=(*job.extra, "--sharding", "zero3"))
    calm = run_with_faults(replace(sharded, spares=0), tmp_path / "calm", FaultSchedule())
    run = run_unharmed(sharded, calm, tmp_path, kills(0))
    assert [event["source"] for event in recoveries(run.events)] == ["memory"] * len(EVOLUTION_PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["after move", "gate", "undo"])
def test_the_same_change_is_interrupted_on_every_host(
    job: Job, calm: FinishedRun, tmp_path: Path, phase: Phase
) -> None:
    schedule = FaultSchedule()
    for rank in (1, 0, 2):
        schedule = schedule.kill(rank, FIRST_STEPS[phase], phase)
    run_unharmed(job, calm, tmp_path, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["after move", "gate"])
def test_all_hosts_are_lost_in_a_change(job: Job, calm: FinishedRun, tmp_path: Path, phase: Phase) -> None:
    schedule = FaultSchedule().kill((0, 1, 2), FIRST_STEPS[phase], phase)
    run = run_with_faults(job, tmp_path / "run", schedule)
    assert run.problems(calm, STEPS) == []
    assert check_experts(run.events, calm.events) == []


@pytest.mark.slow
def test_a_change_is_interrupted_in_a_run_without_snapshots(
    job: Job, calm: FinishedRun, tmp_path: Path
) -> None:
    schedule = FaultSchedule().kill(1, 50, "gate").kill(0, 85, "validate")
    run = run_unharmed(replace(job, snapshot_every=0), calm, tmp_path, schedule)
    assert {event["source"] for event in recoveries(run.events)} == {"disk"}
