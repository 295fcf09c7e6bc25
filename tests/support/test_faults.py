"""Faults as data, who carries them out, and the checks of what a disturbed run leaves: without Ray, on processes that only sleep."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.chaos_table import costs, recovery_table, spread, spread_table, time_kept
from orchestrator.record.events import Event
from tests.support import run_checks as aftermath
from tests.support.fault_injector import Injector, alive, idle_ranks
from tests.support.faults import INSIDE, Fault, Fired, Post, Schedule, When, Whom, kills_every, random_kills
from tests.support.process_watch import Reading, Watch, leaking

# --- schedules


def test_a_schedule_survives_being_written() -> None:
    drawn = random_kills(3, 40, hosts=3, first=10, last=300)
    by_hand = (
        Schedule()
        .kill((0, 2), step=5)
        .stop(1, step=7, wakes_after=2.5)
        .fail("oom", 1, 9)
        .lose("driver", 20)
        .kill("newcomer", phase="recovery")
    )
    for schedule in (drawn, by_hand, kills_every(1, 60, hosts=3, until=300)):
        again = Schedule.from_json(schedule.to_json())
        assert again == schedule
        assert again.seed == schedule.seed


def test_a_seed_names_a_schedule() -> None:
    drawn = random_kills(7, 100, hosts=3, first=20, last=3000)
    assert drawn == random_kills(7, 100, hosts=3, first=20, last=3000)
    assert drawn != random_kills(8, 100, hosts=3, first=20, last=3000)


@pytest.mark.parametrize("seed", range(20))
def test_random_kills_reach_everyone_everywhere(seed: int) -> None:
    faults = random_kills(seed, 200, hosts=3, first=20, last=3000).faults
    assert len(faults) == 200
    assert {rank for fault in faults for rank in fault.whom.ranks} == {0, 1, 2}
    assert {fault.when.phase for fault in faults} == {*INSIDE, "anywhere", "recovery"}
    steps = [fault.when.step for fault in faults if fault.when.phase != "recovery"]
    assert steps == sorted(set(steps))
    assert min(steps) >= 20
    assert max(steps) < 3000
    assert faults[0].when.phase != "recovery", "there is nothing to recover from"
    for before, fault in pairwise(faults):
        if fault.when.phase == "recovery" and before.when.phase != "recovery":
            assert not set(fault.whom.ranks) & set(before.whom.ranks), "who is dead cannot be killed"


def test_kills_by_the_clock() -> None:
    faults = kills_every(0, 60, hosts=3, until=300).faults
    assert [fault.when.seconds for fault in faults] == [60, 120, 180, 240]


def test_more_kills_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="11 kills need"):
        random_kills(0, 11, hosts=3, first=10, last=20)


def broken() -> dict[str, Any]:
    """Faults that cannot be."""
    return {
        "nobody is named": lambda: Whom("ranks"),
        "two ways of naming": lambda: Whom("idle", (1,)),
        "a rank below zero": lambda: Whom("ranks", (-1,)),
        "an unknown phase": lambda: When("lunch"),  # pyright: ignore[reportArgumentType]
        "seconds inside a step": lambda: When("forward", 3, 1.0),
        "an unknown fault": lambda: Fault("flood", Whom("ranks", (0,)), When()),  # pyright: ignore[reportArgumentType]
        "a driver with a rank": lambda: Fault("driver", Whom("ranks", (0,)), When()),
        "a kill of nobody": lambda: Fault("sigkill", Whom("nobody"), When()),
        "an exception from outside": lambda: Fault("exception", Whom("ranks", (0,)), When("anywhere", 3)),
        "a newcomer that knows itself": lambda: Fault("sigkill", Whom("newcomer"), When("forward", 3)),
    }


@pytest.mark.parametrize("name", broken())
def test_faults_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        broken()[name]()


def test_a_fault_happens_once(tmp_path: Path) -> None:
    post, schedule = Post.beside(tmp_path / "run"), Schedule().kill((0, 1), step=3)
    post.lay_out(schedule)
    assert post.schedule() == schedule
    assert post.claim(0, schedule.faults[0], 1, 77, 3)
    assert not post.claim(0, schedule.faults[0], 1, 78, 3)
    assert post.claim(0, schedule.faults[0], 0, 79, 3), "the other victim's is its own"
    assert [(one.fault, one.rank, one.pid) for one in post.fired()] == [(0, 1, 77), (0, 0, 79)]


# --- the injector, on processes that only sleep


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Children of this process in the places of hosts."""
    made = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    reaped = [process.pid for process in made]
    yield reaped
    for process in made:
        process.kill()
        process.wait()


def a_run(folder: Path, pids: list[int], schedule: Schedule, ours: int | None = None) -> Injector:
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True)
    for rank, pid in enumerate(pids):
        (run_dir / "logs" / f"worker_{rank}.pid").write_text(str(pid))
    Post.beside(run_dir).lay_out(schedule)
    return Injector(run_dir, schedule, len(pids), 2**22 + 1, frozenset({ours or os.getpid()}))


def tell(run: Injector, **event: Any) -> None:
    with (run.run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


def test_a_kill_comes_when_its_step_is_recorded(tmp_path: Path, sleepers: list[int]) -> None:
    run = a_run(tmp_path, sleepers, Schedule().kill(1, step=5))
    for step in (3, 4):
        tell(run, event="step", step=step)
        run.look()
    assert [alive(pid) for pid in sleepers] == [True, True, True]
    tell(run, event="step", step=5)
    run.look()
    until(lambda: not alive(sleepers[1]))
    assert [alive(pid) for pid in sleepers] == [True, False, True]
    (fired,) = run.post.fired()
    assert (fired.rank, fired.pid, fired.step) == (1, sleepers[1], 5)


def test_two_at_once_and_then_the_buddy(tmp_path: Path, sleepers: list[int]) -> None:
    run = a_run(tmp_path, sleepers, Schedule().kill((0, 1), step=1).kill("buddy", phase="recovery"))
    tell(run, event="step", step=1)
    run.look()
    until(lambda: not alive(sleepers[0]) and not alive(sleepers[1]))
    assert alive(sleepers[2])
    run.look()
    until(lambda: not alive(sleepers[2]))
    assert run.post.fired()[-1].rank == 2, "rank 2 is next to rank 1"


def test_a_newcomer_is_waited_for(tmp_path: Path, sleepers: list[int]) -> None:
    run = a_run(tmp_path, sleepers, Schedule().kill(0, step=1).kill("newcomer", phase="recovery"))
    tell(run, event="step", step=1)
    run.look()
    run.look()
    assert len(run.post.fired()) == 1, "nobody has taken the place yet"
    (run.run_dir / "logs" / "worker_0.pid").write_text(str(sleepers[2]))
    run.look()
    assert run.post.fired()[-1].pid == sleepers[2]


def test_nobody_else_is_sent_a_signal(tmp_path: Path, sleepers: list[int]) -> None:
    run = a_run(tmp_path, sleepers, Schedule().kill(1, step=1), ours=2**22 + 1)
    tell(run, event="step", step=1)
    run.look()
    time.sleep(0.05)
    assert all(map(alive, sleepers))
    assert run.post.fired() == []


def test_who_is_stopped_is_woken(tmp_path: Path, sleepers: list[int]) -> None:
    run = a_run(tmp_path, sleepers, Schedule().stop(2, step=1, wakes_after=0.2))
    tell(run, event="step", step=1)
    run.look()
    until(lambda: state_of(sleepers[2]) == "T")
    time.sleep(0.2)
    run.look()
    until(lambda: state_of(sleepers[2]) == "S")


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_hosts_without_experts_are_read_from_the_placement() -> None:
    placed: Event = {"event": "placement", "layers": [{"host_of": [0, 0, 2]}, {"host_of": [2, 2, 0]}]}
    assert idle_ranks([placed], 3) == [1]
    assert idle_ranks([], 3) == []


# --- what must hold: each check can fail


def steps(*numbers: int, per_epoch: int = 4, samples: int = 2) -> list[Event]:
    fields = {"event": "step", "loss": 1.0, "grad_norm": 1.0, "samples": samples, "seconds": 0.01}
    return [
        {**fields, "step": number, "epoch": (number - 1) // per_epoch, "time": float(number)}
        for number in numbers
    ]


def test_missing_and_extra_steps_are_seen() -> None:
    assert aftermath.wrong_steps(steps(1, 2, 3, 2, 3, 4), 4) == []
    assert aftermath.wrong_steps(steps(1, 2, 4, 5), 4) == ["missing steps [3]", "unexpected steps [5]"]


def test_a_loss_that_differs_in_the_last_bit_is_seen() -> None:
    other = steps(1, 2)
    other[1]["loss"] = 1.0 + 2**-52
    assert aftermath.wrong_losses(steps(1, 2), steps(1, 2)) == []
    assert "step 2" in aftermath.wrong_losses(other, steps(1, 2))[0]
    assert aftermath.wrong_losses(other, steps(1, 2), relative=1e-5) == []


def test_samples_that_do_not_add_up_are_seen() -> None:
    assert aftermath.wrong_counts(steps(*range(1, 7)), 8) == []
    assert aftermath.wrong_counts(steps(1, 2, 3, 5, 6), 8) == ["epoch 0: 6 samples of 8"]


def saw(post: Post, pid: int, rank: int, step: int, at: float, ids: list[int], attempt: int = 1) -> None:
    (post.folder / "seen").mkdir(parents=True, exist_ok=True)
    with (post.folder / "seen" / f"{pid}.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": at, "rank": rank, "step": step, "attempt": attempt, "pid": pid, "ids": ids})
            + "\n"
        )


def test_of_a_step_done_again_the_last_go_counts(tmp_path: Path) -> None:
    """Rank 1 is lost in step 2 of an epoch of two; a newcomer does it again with rank 0, which lived on."""
    post, events = Post(tmp_path), [*steps(1, 2, 3, per_epoch=2), {"event": "failure", "time": 2.5}]
    for step, at, ids in ((1, 1.0, [0]), (2, 2.0, [1]), (2, 3.0, [1]), (3, 4.0, [2])):
        saw(post, 10, 0, step, at, ids, attempt=int(at))
    saw(post, 11, 1, 1, 1.0, [2])
    saw(post, 11, 1, 2, 2.0, [3])
    saw(post, 12, 1, 2, 3.0, [3])
    saw(post, 12, 1, 3, 4.0, [0])
    assert aftermath.wrong_samples(events, post, 4) == []
    saw(post, 12, 1, 3, 4.0, [2])
    assert aftermath.wrong_samples(events, post, 4) == [
        "epoch 1: 2 of 4 samples seen, 1 of them more than once"
    ]


def test_a_sample_that_nobody_saw_is_missed(tmp_path: Path) -> None:
    post, events = Post(tmp_path), steps(1, 2, 3, per_epoch=2)
    for step, ids in ((1, [0, 1]), (2, [2]), (3, [1])):
        saw(post, 10, 0, step, float(step), ids)
    assert aftermath.wrong_samples(events, post, 4) == [
        "epoch 0: 3 of 4 samples seen, 0 of them more than once"
    ]
    assert aftermath.wrong_samples(events, Post(tmp_path / "empty"), 4) == ["no record of any sample"]


def test_weights_are_compared_bit_by_bit(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 0.0, float("nan")])
    for name, value in (("a", weight), ("b", weight.clone()), ("c", torch.tensor([1.0, -0.0, float("nan")]))):
        folder = tmp_path / name / "checkpoints" / "step_00000004"
        folder.mkdir(parents=True)
        save_file({"w": value}, folder / "model.safetensors")
        save_file({"exp_avg/w": weight}, folder / "optimizer.safetensors")
    assert aftermath.wrong_weights(tmp_path / "a", tmp_path / "b") == []
    assert aftermath.wrong_weights(tmp_path / "a", tmp_path / "c") == ["model.safetensors: w differs"]


def test_a_process_that_stays_is_found(monkeypatch: pytest.MonkeyPatch, sleepers: list[int]) -> None:
    monkeypatch.setattr(aftermath, "_GRACE_SECONDS", 0.2)
    assert aftermath.left_processes([sleepers[0]]) == [f"process {sleepers[0]} is left: sleep 60"]
    os.kill(sleepers[0], signal.SIGKILL)
    assert aftermath.left_processes([sleepers[0]]) == []


def test_shared_memory_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aftermath, "_GRACE_SECONDS", 0.2)
    before, name = aftermath.shared_memory(), f"left-by-a-test-{os.getpid()}"
    path = Path("/dev/shm", name)
    path.write_bytes(b"x")
    try:
        assert f"shared memory {name} is left" in aftermath.left_memory(before)
    finally:
        path.unlink()


def test_files_that_pile_up_are_found(tmp_path: Path) -> None:
    """A host that comes late and loads what all have is no leak; one that keeps a file of every fault is."""
    calm, watch, moments = Watch(1, tmp_path), Watch(2, tmp_path), [10.0 * number for number in range(1, 10)]
    calm.member_since = {5: 5.0}
    calm.readings = {
        1: [Reading(1.0, 9, 3, 9)],
        5: [Reading(1.0, 20, 5, 9), Reading(2.0, 25, 5, 9), Reading(3.0, 19, 5, 9)],
    }
    watch.member_since = {7: 5.0, 8: 55.0}
    grows = [Reading(float(t), 20 + 2 * t // 8, 5, 9) for t in range(100)]
    settles = [Reading(float(t), 20 + 3 * min(t, 4), 5, 9) for t in range(100)]
    watch.readings = {2: [Reading(1.0, 9, 23, 9), Reading(2.0, 0, 1, 0)], 7: grows, 8: settles, 9: grows}
    assert [(one.pid, one.faults) for one in watch.held(moments)] == [(7, 9), (8, 4), (2, 0)]
    assert leaking(watch, calm, moments) == [
        "host process 7 had 44 files after 9 faults, where 25 are usual",
        "the driver had 23 threads after 0 faults, where 3 are usual",
    ]


# --- the table


def story() -> tuple[list[Fired], list[Event]]:
    """Two kills: of the first, a step is recorded late; the second comes before the group stands, and has no failure of its own."""

    def step(number: int, at: float) -> Event:
        return {**steps(number)[0], "time": at}

    told = {
        "event": "recovery",
        "attempt": 1,
        "total_seconds": 2.0,
        "detect_seconds": 0.1,
        "lost_steps": 1,
        "source": "memory",
    }
    events = [step(1, 1.0), step(2, 2.0), step(3, 3.01), {"event": "failure", "time": 3.1}, step(3, 5.0)]
    events += [
        {**told, "time": 5.0, "total_seconds": 1.0},
        {**told, "time": 5.01},
        step(4, 6.0),
        step(5, 7.0),
        step(6, 8.0),
        step(7, 9.0),
    ]
    kill = Fired(0, "sigkill", "anywhere", 1, 11, 2, 3.0)
    return [kill, replace(kill, fault=1, rank=0, phase="recovery", time=4.0)], events


def test_a_kill_costs_the_time_to_the_next_step() -> None:
    fired, events = story()
    first, second = costs(fired, events)
    assert first.next_step == pytest.approx(2.0), "the step that was recorded late is no sign of life"
    assert first.back == pytest.approx(3.0)
    assert first.recovery is not None
    assert first.recovery["total_seconds"] == 2.0, "the last words count"
    assert second.next_step == pytest.approx(1.0)
    assert time_kept([first, second], events) == pytest.approx(1 - 3.0 / 8.0)
    assert "| 1 | 1 | anywhere | 2 | 0.10 | – | – | – | 2.00 | 2.00 | 1 | memory |" in recovery_table([first])
    assert "| plain TorchTrainer, kill to next step done | 2 | 15.00 | 20.00 | 20.00 |" in spread_table(
        [first], [20.0, 10.0]
    )


def test_the_spread_is_of_what_was_measured() -> None:
    values = random.Random(0).sample(range(1, 101), 100)
    assert spread([float(value) for value in values]) == (50.5, 95.0, 100.0)
    assert spread([None, 3.0]) == (3.0, 3.0, 3.0)
    assert spread([None]) is None
