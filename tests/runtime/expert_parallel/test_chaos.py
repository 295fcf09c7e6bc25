"""Faults of every kind, at any moment, to any host: the run goes through, and its results are those of the run left in peace."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.record.events import of_kind, read_events
from tests.support.chaos_runs import SAMPLES, Ended, Job, disturbed
from tests.support.cluster import Cluster, cluster
from tests.support.faults import Phase, Post, Schedule, random_kills
from tests.support.run_checks import (
    left_in,
    recoveries,
    told,
    wrong_counts,
    wrong_losses,
    wrong_run,
    wrong_samples,
    wrong_steps,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
STEPS = 90
PHASES: tuple[Phase, ...] = ("forward", "backward", "exchange", "snapshot", "checkpoint")


@pytest.fixture(scope="module")
def job(shared_cluster: Cluster) -> Job:
    return Job(STEPS, here=shared_cluster)


@pytest.fixture(scope="module")
def calm(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run left in peace; who stands by would have nothing to do."""
    ended = disturbed(replace(job, spares=0), tmp_path_factory.mktemp("calm") / "run", Schedule())
    assert ended.wrong(ended, STEPS) == []
    return ended


def shrugs(job: Job, calm: Ended, folder: Path, schedule: Schedule, happened: int | None = None) -> Ended:
    """Run under a schedule: all of it happens, and nothing comes of it."""
    ended = disturbed(job, folder / "run", schedule)
    assert ended.wrong(calm, STEPS) == []
    assert len(ended.fired) == (len(schedule.faults) if happened is None else happened), ended.fired
    return ended


def test_five_random_kills(job: Job, calm: Ended, tmp_path: Path) -> None:
    ended = shrugs(job, calm, tmp_path, random_kills(5, 5, hosts=3, first=12, last=75))
    assert 1 <= len(recoveries(ended.events)) <= 5
    assert told(ended.run_dir)["workers"] == 3
    assert 0 < told(ended.run_dir)["goodput"] <= 1


VICTIMS = {
    "the main host": Schedule().kill(0, step=33),
    "two at once": Schedule().kill((1, 2), step=33),
    "two at once, the main one among them": Schedule().kill((0, 1), step=33),
    "all at once": Schedule().kill((0, 1, 2), step=33),
    "the buddy of the one just killed": Schedule()
    .kill(1, step=33)
    .kill("buddy", phase="recovery", seconds=0.3),
    "the one that took its place": Schedule().kill(1, step=33).kill("newcomer", phase="recovery"),
    "the main host and who took its place, twice": Schedule()
    .kill(0, step=33)
    .kill("newcomer", phase="recovery")
    .kill("newcomer", phase="recovery"),
    "before the first copy": Schedule().kill(1, step=3),
    "at the end": Schedule().kill(2, step=STEPS - 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VICTIMS)
def test_any_victim(job: Job, calm: Ended, tmp_path: Path, name: str) -> None:
    schedule = VICTIMS[name]
    shrugs(job, calm, tmp_path, schedule, sum(max(1, len(fault.whom.ranks)) for fault in schedule.faults))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_any_moment(job: Job, calm: Ended, tmp_path: Path, phase: Phase, rank: int) -> None:
    ended = shrugs(job, calm, tmp_path, Schedule().kill(rank, step=33, phase=phase))
    assert len(recoveries(ended.events)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5, 1.0, 2.0])
def test_during_recovery(job: Job, calm: Ended, tmp_path: Path, seconds: float) -> None:
    shrugs(job, calm, tmp_path, Schedule().kill(1, step=33).kill(0, phase="recovery", seconds=seconds))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["anywhere", "exchange", "snapshot"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_stopped_for_good(
    job: Job, calm: Ended, tmp_path: Path, phase: Phase, rank: int
) -> None:
    """It is noticed when a step has stood still for as long as it may, and ended."""
    ended = shrugs(job, calm, tmp_path, Schedule().stop(rank, step=33, phase=phase))
    (recovery,) = recoveries(ended.events)
    assert "stuck" in recovery["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_wakes_when_it_has_been_replaced(
    job: Job, calm: Ended, tmp_path: Path, rank: int
) -> None:
    """Whoever comes back from the dead has no say any more: not the one that writes the record, either."""
    shrugs(job, calm, tmp_path, Schedule().stop(rank, step=33, wakes_after=job.collective_timeout + 2.0))


@pytest.mark.slow
def test_a_host_that_dozes_is_waited_for(job: Job, calm: Ended, tmp_path: Path) -> None:
    ended = shrugs(job, calm, tmp_path, Schedule().stop(1, step=33, wakes_after=3.0))
    assert of_kind(ended.events, "failure") == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_a_step(job: Job, calm: Ended, tmp_path: Path, rank: int) -> None:
    ended = shrugs(job, calm, tmp_path, Schedule().fail("exception", rank, 33))
    assert len(recoveries(ended.events)) == 1


@pytest.mark.slow
def test_an_exception_that_comes_again_is_told(job: Job, tmp_path: Path) -> None:
    ended = disturbed(job, tmp_path / "run", Schedule().fail("exception", 1, 33).fail("exception", 1, 33))
    assert ended.code == 2, ended.output
    assert "a fault of the schedule" in ended.output
    assert "Traceback" not in ended.output
    assert ended.left == []


@pytest.mark.slow
def test_out_of_memory_in_one_host(job: Job, calm: Ended, tmp_path: Path) -> None:
    """All go on with half the micro-batch and the same global batch: the same to rounding."""
    ended = disturbed(job, tmp_path / "run", Schedule().fail("oom", 1, 33))
    assert ended.code == 0, ended.output
    assert [
        *wrong_steps(ended.events, STEPS),
        *wrong_losses(ended.events, calm.events, 1e-5),
        *ended.left,
    ] == []
    assert wrong_samples(ended.events, Post.beside(ended.run_dir), SAMPLES) == []
    assert len(ended.fired) == 1


@pytest.mark.slow
def test_a_full_disk_once(job: Job, calm: Ended, tmp_path: Path) -> None:
    ended = shrugs(job, calm, tmp_path, Schedule().fail("disk", 0, 33, "checkpoint"))
    assert any("could not be saved" in event["message"] for event in of_kind(ended.events, "warning"))


@pytest.mark.slow
def test_a_disk_that_is_full_indeed(job: Job, calm: Ended, tmp_path: Path) -> None:
    """No checkpoint fits any more, nor a line of the record: the run ends with a word about it, or goes on; nothing hangs or stays."""
    with small_disk(tmp_path / "disk", "1500k") as disk:
        ended = disturbed(job, disk / "run", Schedule(), timeout=300)
        assert ended.left == []
        assert ended.code in (0, 3, 4), ended.output
        assert "space" in ended.output.lower() or ended.code == 0, ended.output


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a file system of its own is not to be had here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("idle", [1, 2])
def test_the_host_without_experts(job: Job, tmp_path: Path, idle: int) -> None:
    homes = [[rank for rank in range(3) if rank != idle][number % 2] for number in range(6)]
    (tmp_path / "placement.json").write_text(json.dumps({"host_of": homes}))
    placed = replace(job, extra=("--placement", str(tmp_path / "placement.json")))
    calm = disturbed(placed, tmp_path / "calm", Schedule())
    ended = shrugs(placed, calm, tmp_path, Schedule().kill("idle", step=33))
    assert [one.rank for one in ended.fired] == [idle]


@pytest.mark.slow
def test_without_a_spare(job: Job, calm: Ended, tmp_path: Path) -> None:
    shrugs(replace(job, spares=0), calm, tmp_path, Schedule().kill(1, step=33))


@pytest.mark.slow
def test_from_the_disk_alone(job: Job, calm: Ended, tmp_path: Path) -> None:
    ended = shrugs(replace(job, snapshot_every=0), calm, tmp_path, Schedule().kill(1, step=33))
    assert [event["source"] for event in recoveries(ended.events)] == ["disk"]


@pytest.mark.slow
def test_a_raylet_that_is_killed(tmp_path: Path) -> None:
    """The hosts of its node are gone with it. Those on the other go on, with the same global batch."""
    with cluster(cpus=2) as here:
        here.add_node(cpus=1)
        job = Job(STEPS, spares=0, here=here)
        calm = disturbed(job, tmp_path / "calm", Schedule())
        ended = disturbed(job, tmp_path / "run", Schedule().lose("raylet", 33))
        assert ended.code == 0, ended.output
        assert [
            *wrong_steps(ended.events, STEPS),
            *wrong_losses(ended.events, calm.events, 1e-5),
            *ended.left,
        ] == []
        assert wrong_samples(ended.events, Post.beside(ended.run_dir), SAMPLES) == []
        assert told(ended.run_dir)["workers"] == 2


@pytest.mark.slow
def test_a_raylet_that_is_killed_with_room_elsewhere(tmp_path: Path) -> None:
    """Copies of its hosts' state are on the other node too."""
    with cluster(cpus=4) as here:
        here.add_node(cpus=1)
        job = Job(STEPS, spares=1, here=here)
        calm = disturbed(job, tmp_path / "calm", Schedule())
        ended = disturbed(job, tmp_path / "run", Schedule().lose("raylet", 33))
        assert wrong_run(ended.run_dir, calm.run_dir, STEPS, SAMPLES) == []
        assert ended.left == []


@pytest.mark.slow
def test_the_driver_is_killed(job: Job, calm: Ended, tmp_path: Path) -> None:
    """Its hosts go with it; the next one takes up where the newest checkpoint is."""
    run_dir = tmp_path / "run"
    ended = disturbed(job, run_dir, Schedule().lose("driver", 33))
    assert ended.code == -9
    assert ended.left == []
    again = disturbed(job, run_dir, Schedule(), "--resume", "auto")
    assert again.code == 0, again.output
    assert wrong_run(run_dir, calm.run_dir, STEPS, SAMPLES) == []
    assert again.left == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_twenty_random_kills(job: Job, tmp_path: Path, seed: int) -> None:
    long = replace(job, steps=500)
    calm = disturbed(long, tmp_path / "calm", Schedule())
    ended = disturbed(
        long, tmp_path / "run", random_kills(seed, 20, hosts=3, first=15, last=480), timeout=1200
    )
    assert ended.wrong(calm, 500) == []
    assert len(ended.fired) == 20
    assert wrong_counts(read_events(ended.run_dir / "events.jsonl"), SAMPLES) == []
    assert left_in(job.here) == [] if job.here else True
