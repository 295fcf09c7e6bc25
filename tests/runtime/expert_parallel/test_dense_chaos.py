"""Kills of the hosts of a dense model: the others keep their processes, and the run ends as the undisturbed
one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults.chaos_runs import DENSE_SETTINGS, FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import DENSE_WEIGHTS, FaultFolder, FaultSchedule, random_kills
from harness.faults.run_checks import check_losses, check_steps, check_survivors, recoveries
from harness.hosts.cluster import local_cluster
from harness.runs.cli_runs import read_summary

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
STEPS = 40


def dense(job: Job, steps: int = STEPS, *flags: str) -> Job:
    return replace(job, steps=steps, settings=tuple(DENSE_SETTINGS), extra=flags)


def sources(run: FinishedRun) -> set[str]:
    return {event["source"] for event in recoveries(run.events)}


@pytest.mark.extended
@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_a_killed_host_of_a_dense_model_is_replaced(job: Job, tmp_path: Path, sharding: str) -> None:
    """The others keep their processes; losses and weights have the bits of the undisturbed run."""
    own = replace(dense(job, STEPS, "--sharding", sharding), hosts=2, spares=0)
    calm = run_with_faults(own, tmp_path / "calm", FaultSchedule())
    run = run_with_faults(own, tmp_path / "run", FaultSchedule().kill(1, step=23))
    assert run.problems(calm, STEPS) == []
    assert (sources(run), len(run.fired)) == ({"memory"}, 1)
    assert check_survivors(FaultFolder.of_run(run.run_dir), own.hosts) == []
    assert read_summary(run.run_dir)["strategy"] == "live_data_parallel"
    assert "expert" not in run.output.replace("expert-orchestrator", "")


@pytest.mark.extended
def test_two_hosts_go_on_where_the_node_of_the_third_is_lost(tmp_path: Path) -> None:
    """They divide its shards, which come from the backup on their node, and round otherwise."""
    with local_cluster(cpus=2) as cluster:
        cluster.add_node(cpus=1)
        own = replace(dense(Job(STEPS, cluster=cluster), STEPS, "--sharding", "zero2"), spares=0)
        calm = run_with_faults(own, tmp_path / "calm", FaultSchedule())
        run = run_with_faults(own, tmp_path / "run", FaultSchedule().lose("raylet", 23))
    assert run.exit_code == 0, run.output
    assert check_steps(run.events, STEPS) == []
    assert check_losses(run.events, calm.events, 1e-5) == []
    assert (sources(run), run.leftovers) == ({"memory"}, [])
    assert read_summary(run.run_dir)["workers"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_random_kills_of_a_dense_model(job: Job, tmp_path: Path, sharding: str) -> None:
    steps = 400
    own = dense(job, steps, "--sharding", sharding)
    calm = run_with_faults(replace(own, spares=0), tmp_path / "calm", FaultSchedule())
    schedule = random_kills(3, 15, hosts=3, first=15, last=steps - 20, phase_weights=DENSE_WEIGHTS)
    run = run_with_faults(own, tmp_path / "run", schedule, timeout=800)
    assert run.problems(calm, steps) == []
    assert len(run.fired) == 15
    assert sources(run) == {"memory"}
