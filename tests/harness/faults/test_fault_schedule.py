"""Fault schedules as data, and the folder by which they are shared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.faults.fault_schedule import (
    EVOLUTION_PHASES,
    EVOLUTION_WEIGHTS,
    PHASE_WEIGHTS,
    Fault,
    FaultFolder,
    FaultSchedule,
    Moment,
    Victim,
    kills_every,
    random_kills,
)


def test_a_schedule_survives_json() -> None:
    drawn = random_kills(3, 40, hosts=3, first=10, last=300)
    by_hand = (
        FaultSchedule()
        .kill((0, 2), step=5)
        .stop(1, step=7, wakes_after_s=2.5)
        .fail("oom", 1, 9)
        .lose("driver", 20)
        .kill("newcomer", phase="recovery")
    )
    for schedule in (drawn, by_hand, kills_every(1, 60, hosts=3, until=300)):
        parsed = FaultSchedule.from_json(schedule.to_json())
        assert parsed == schedule
        assert parsed.seed == schedule.seed


def test_a_seed_determines_a_schedule() -> None:
    drawn = random_kills(7, 100, hosts=3, first=20, last=3000)
    assert drawn == random_kills(7, 100, hosts=3, first=20, last=3000)
    assert drawn != random_kills(8, 100, hosts=3, first=20, last=3000)


@pytest.mark.parametrize("seed", range(20))
def test_random_kills_hit_every_rank_in_every_phase(seed: int) -> None:
    faults = random_kills(seed, 200, hosts=3, first=20, last=3000).faults
    assert len(faults) == 200
    assert {rank for fault in faults for rank in fault.victim.ranks} == {0, 1, 2}
    assert {fault.moment.phase for fault in faults} == set(PHASE_WEIGHTS)
    steps = [fault.moment.step for fault in faults if fault.moment.phase != "recovery"]
    assert steps == sorted(set(steps))
    assert min(steps) >= 20
    assert max(steps) < 3000
    assert faults[0].moment.phase != "recovery", "there is nothing to recover from"
    for before, fault in pairwise(faults):
        if fault.moment.phase == "recovery" and before.moment.phase != "recovery":
            assert not set(fault.victim.ranks) & set(before.victim.ranks), "a dead host cannot be killed"


def test_kills_at_regular_times() -> None:
    faults = kills_every(0, 60, hosts=3, until=300).faults
    assert [fault.moment.seconds for fault in faults] == [60, 120, 180, 240]


def test_more_kills_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="11 kills need"):
        random_kills(0, 11, hosts=3, first=10, last=20)


RANK_0 = Victim("ranks", (0,))
IMPOSSIBLE: dict[str, Callable[[], Any]] = {
    "no rank is named": lambda: Victim("ranks"),
    "a rank and a kind are named": lambda: Victim("idle", (1,)),
    "a rank below zero": lambda: Victim("ranks", (-1,)),
    "an unknown phase": lambda: Moment("lunch"),  # pyrefly: ignore[bad-argument-type]
    "seconds inside a step": lambda: Moment("forward", 3, 1.0),
    "an unknown fault": lambda: Fault("flood", RANK_0, Moment()),  # pyrefly: ignore[bad-argument-type]
    "a driver with a rank": lambda: Fault("driver", RANK_0, Moment()),
    "a kill of nobody": lambda: Fault("sigkill", Victim("nobody"), Moment()),
    "an exception from outside": lambda: Fault("exception", RANK_0, Moment("anywhere", 3)),
    "a newcomer that knows itself": lambda: Fault("sigkill", Victim("newcomer"), Moment("forward", 3)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_faults_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        IMPOSSIBLE[name]()


def test_a_fault_happens_once(tmp_path: Path) -> None:
    folder = FaultFolder.of_run(tmp_path / "run")
    schedule = FaultSchedule().kill((0, 1), step=3)
    folder.write(schedule, pace_s=0.5)
    assert folder.schedule() == schedule
    assert folder.pace_s() == 0.5
    (fault,) = schedule.faults
    assert folder.claim(0, fault, 1, 77, 3)
    assert not folder.claim(0, fault, 1, 78, 3)
    assert folder.claim(0, fault, 0, 79, 3), "the other victim has a claim of its own"
    assert [(fired.fault, fired.rank, fired.pid) for fired in folder.fired()] == [(0, 1, 77), (0, 0, 79)]


def test_a_run_without_a_schedule_has_no_faults(tmp_path: Path) -> None:
    folder = FaultFolder.of_run(tmp_path / "run")
    assert folder.schedule() == FaultSchedule()
    assert folder.pace_s() == 0.0


def test_a_third_of_the_kills_hits_a_change_of_experts() -> None:
    assert sum(EVOLUTION_WEIGHTS.values()) == pytest.approx(1.0, abs=0.01)
    drawn = random_kills(1, 300, hosts=3, first=20, last=3000, phase_weights=EVOLUTION_WEIGHTS)
    in_changes = [fault for fault in drawn.faults if fault.moment.phase in EVOLUTION_PHASES]
    assert len(in_changes) == pytest.approx(100, abs=20)
    assert {fault.moment.phase for fault in in_changes} == set(EVOLUTION_PHASES)
