"""Faults of every kind, at any moment, to any host: the run completes with the results of the
undisturbed run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults.chaos_runs import SAMPLES, FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultFolder, FaultSchedule, Phase, random_kills
from harness.faults.run_checks import (
    check_losses,
    check_run,
    check_sample_counts,
    check_samples,
    check_steps,
    leftovers_in_cluster,
    recoveries,
)
from harness.hosts.cluster import local_cluster
from harness.runs.cli_runs import read_summary
from orchestrator.record.files.reading import of_kind, read_events
from tests.runtime.expert_parallel.conftest import STEPS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
PHASES: tuple[Phase, ...] = (
    "data",
    "forward",
    "counts",
    "exchange",
    "backward",
    "gradients",
    "snapshot",
    "checkpoint",
)


def run_unharmed(
    job: Job, calm: FinishedRun, folder: Path, schedule: FaultSchedule, num_fired: int | None = None
) -> FinishedRun:
    """Run under a schedule. All its faults happen, and the result is that of the undisturbed run."""
    run = run_with_faults(job, folder / "run", schedule)
    assert run.problems(calm, STEPS) == []
    assert len(run.fired) == (len(schedule.faults) if num_fired is None else num_fired), run.fired
    return run


@pytest.mark.parametrize("num_kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_random_kills(job: Job, calm: FinishedRun, tmp_path: Path, num_kills: int) -> None:
    run = run_unharmed(job, calm, tmp_path, random_kills(5, num_kills, hosts=3, first=12, last=75))
    assert 1 <= len(recoveries(run.events)) <= num_kills
    summary = read_summary(run.run_dir)
    assert summary["workers"] == 3
    assert 0 < summary["goodput"] <= 1


KILLS = {
    "the main host": FaultSchedule().kill(0, step=33),
    "two at once": FaultSchedule().kill((1, 2), step=33),
    "two at once, with the main host": FaultSchedule().kill((0, 1), step=33),
    "all at once": FaultSchedule().kill((0, 1, 2), step=33),
    "the buddy of the last victim": (
        FaultSchedule().kill(1, step=33).kill("buddy", phase="recovery", seconds=0.3)
    ),
    "the replacement": FaultSchedule().kill(1, step=33).kill("newcomer", phase="recovery"),
    "the main host and its replacement, twice": (
        FaultSchedule().kill(0, step=33).kill("newcomer", phase="recovery").kill("newcomer", phase="recovery")
    ),
    "before the first snapshot": FaultSchedule().kill(1, step=3),
    "at the last step": FaultSchedule().kill(2, step=STEPS - 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_kills_of_any_host(job: Job, calm: FinishedRun, tmp_path: Path, name: str) -> None:
    schedule = KILLS[name]
    num_victims = sum(max(1, len(fault.victim.ranks)) for fault in schedule.faults)
    run_unharmed(job, calm, tmp_path, schedule, num_victims)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_kills_in_any_phase(job: Job, calm: FinishedRun, tmp_path: Path, phase: Phase, rank: int) -> None:
    run = run_unharmed(job, calm, tmp_path, FaultSchedule().kill(rank, step=33, phase=phase))
    assert len(recoveries(run.events)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5, 1.0, 2.0])
def test_kills_during_a_recovery(job: Job, calm: FinishedRun, tmp_path: Path, seconds: float) -> None:
    schedule = FaultSchedule().kill(1, step=33).kill(0, phase="recovery", seconds=seconds)
    run_unharmed(job, calm, tmp_path, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["anywhere", "exchange", "snapshot"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_freezes_for_good(
    job: Job, calm: FinishedRun, tmp_path: Path, phase: Phase, rank: int
) -> None:
    """It is found when a step takes longer than allowed, and killed."""
    run = run_unharmed(job, calm, tmp_path, FaultSchedule().stop(rank, step=33, phase=phase))
    (recovery,) = recoveries(run.events)
    assert "stuck" in recovery["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_wakes_after_it_was_replaced(
    job: Job, calm: FinishedRun, tmp_path: Path, rank: int
) -> None:
    """It changes nothing any more, even if it is the host that writes the event log."""
    wakes_after_s = job.collective_timeout + 2.0
    run_unharmed(job, calm, tmp_path, FaultSchedule().stop(rank, step=33, wakes_after_s=wakes_after_s))


@pytest.mark.slow
def test_a_host_that_freezes_briefly_is_waited_for(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    run = run_unharmed(job, calm, tmp_path, FaultSchedule().stop(1, step=33, wakes_after_s=3.0))
    assert of_kind(run.events, "failure") == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_a_step(job: Job, calm: FinishedRun, tmp_path: Path, rank: int) -> None:
    run = run_unharmed(job, calm, tmp_path, FaultSchedule().fail("exception", rank, 33))
    assert len(recoveries(run.events)) == 1


@pytest.mark.slow
def test_an_exception_that_repeats_ends_the_run_with_its_message(job: Job, tmp_path: Path) -> None:
    schedule = FaultSchedule().fail("exception", 1, 33).fail("exception", 1, 33)
    run = run_with_faults(job, tmp_path / "run", schedule)
    assert run.exit_code == 2, run.output
    assert "a fault of the schedule" in run.output
    assert "Traceback" not in run.output
    assert run.leftovers == []


@pytest.mark.slow
def test_out_of_memory_in_one_host(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    """All hosts continue with half the micro-batch and the same global batch: results are equal up
    to rounding."""
    run = run_with_faults(job, tmp_path / "run", FaultSchedule().fail("oom", 1, 33))
    assert run.exit_code == 0, run.output
    assert check_steps(run.events, STEPS) == []
    assert check_losses(run.events, calm.events, 1e-5) == []
    assert check_samples(run.events, FaultFolder.of_run(run.run_dir), SAMPLES) == []
    assert run.leftovers == []
    assert len(run.fired) == 1


@pytest.mark.slow
def test_a_disk_that_is_full_once(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    run = run_unharmed(job, calm, tmp_path, FaultSchedule().fail("disk", 0, 33, "checkpoint"))
    warnings = of_kind(run.events, "warning")
    assert any("could not be saved" in event["message"] for event in warnings)


@pytest.mark.slow
def test_a_disk_that_stays_full(job: Job, tmp_path: Path) -> None:
    """Neither checkpoints nor events fit any more: the run goes on, or ends with a message. Nothing
    hangs or stays."""
    with small_disk(tmp_path / "disk", "1500k") as disk:
        run = run_with_faults(job, disk / "run", FaultSchedule(), timeout=300)
        assert run.leftovers == []
        assert run.exit_code in (0, 3, 4), run.output
        assert "space" in run.output.lower() or run.exit_code == 0, run.output


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("idle", [1, 2])
def test_a_kill_of_a_host_without_experts(job: Job, tmp_path: Path, idle: int) -> None:
    busy = [rank for rank in range(3) if rank != idle]
    host_of = [busy[expert % 2] for expert in range(5)]
    (tmp_path / "placement.json").write_text(json.dumps({"host_of": host_of}))
    placed = replace(job, extra=(*job.extra, "--placement", str(tmp_path / "placement.json")))
    calm = run_with_faults(placed, tmp_path / "calm", FaultSchedule())
    run = run_unharmed(placed, calm, tmp_path, FaultSchedule().kill("idle", step=33))
    assert [fault.rank for fault in run.fired] == [idle]


@pytest.mark.slow
def test_a_kill_without_a_spare(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    run_unharmed(replace(job, spares=0), calm, tmp_path, FaultSchedule().kill(1, step=33))


@pytest.mark.slow
def test_a_kill_without_snapshots(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    run = run_unharmed(replace(job, snapshot_every=0), calm, tmp_path, FaultSchedule().kill(1, step=33))
    assert [event["source"] for event in recoveries(run.events)] == ["disk"]


@pytest.mark.slow
def test_a_killed_raylet_leaves_the_other_node_to_continue(tmp_path: Path) -> None:
    """The hosts of its node are lost. The others continue with the same global batch."""
    with local_cluster(cpus=2) as cluster:
        cluster.add_node(cpus=1)
        job = Job(STEPS, spares=0, cluster=cluster)
        calm = run_with_faults(job, tmp_path / "calm", FaultSchedule())
        run = run_with_faults(job, tmp_path / "run", FaultSchedule().lose("raylet", 33))
        assert run.exit_code == 0, run.output
        assert check_steps(run.events, STEPS) == []
        assert check_losses(run.events, calm.events, 1e-5) == []
        assert check_samples(run.events, FaultFolder.of_run(run.run_dir), SAMPLES) == []
        assert run.leftovers == []
        assert read_summary(run.run_dir)["workers"] == 2


@pytest.mark.slow
def test_a_killed_raylet_with_a_spare_on_the_other_node(tmp_path: Path) -> None:
    """Backups of its hosts' snapshots are on the other node."""
    with local_cluster(cpus=4) as cluster:
        cluster.add_node(cpus=1)
        job = Job(STEPS, spares=1, cluster=cluster)
        calm = run_with_faults(job, tmp_path / "calm", FaultSchedule())
        run = run_with_faults(job, tmp_path / "run", FaultSchedule().lose("raylet", 33))
        assert check_run(run.run_dir, calm.run_dir, STEPS, SAMPLES) == []
        assert run.leftovers == []


@pytest.mark.slow
def test_a_killed_driver_leaves_a_run_that_can_be_resumed(
    job: Job, calm: FinishedRun, tmp_path: Path
) -> None:
    """Its hosts end with it. The next driver resumes from the newest checkpoint."""
    run_dir = tmp_path / "run"
    killed = run_with_faults(job, run_dir, FaultSchedule().lose("driver", 33))
    assert killed.exit_code == -9
    assert killed.leftovers == []
    resumed = run_with_faults(job, run_dir, FaultSchedule(), "--resume", "auto")
    assert resumed.exit_code == 0, resumed.output
    assert check_run(run_dir, calm.run_dir, STEPS, SAMPLES) == []
    assert resumed.leftovers == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_twenty_random_kills(job: Job, tmp_path: Path, seed: int) -> None:
    long_job = replace(job, steps=500)
    calm = run_with_faults(long_job, tmp_path / "calm", FaultSchedule())
    schedule = random_kills(seed, 20, hosts=3, first=15, last=480)
    run = run_with_faults(long_job, tmp_path / "run", schedule, timeout=1200)
    assert run.problems(calm, 500) == []
    assert len(run.fired) == 20
    assert check_sample_counts(read_events(run.run_dir / "events.jsonl"), SAMPLES) == []
    assert job.cluster is not None
    assert leftovers_in_cluster(job.cluster) == []
