"""What is done after a failure: one test per arrow."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runtime.recovery import (
    Again,
    Failure,
    GiveUp,
    HostHealth,
    HostStatus,
    Kind,
    Regroup,
    Tally,
    Wait,
    decide,
    limit_s,
    regroup,
    stuck,
    tallied,
    worst,
)

LOST = Failure("worker", "worker 1 was lost", 1)
NOW: dict[str, Any] = {"failures": 1, "max_failures": 3, "workers": 4, "slots": 4, "halvings": 1}


def test_a_lost_worker_is_replaced() -> None:
    assert decide(LOST, **NOW) == Again(4, 1, "worker 1 was lost")
    assert isinstance(decide(Failure("communication", "lost touch"), **NOW), Again)
    assert isinstance(decide(Failure("resources", "start timed out"), **NOW), Again)


def test_a_lost_node_leaves_fewer_workers() -> None:
    made = decide(LOST, **NOW | {"slots": 3})
    assert isinstance(made, Again)
    assert (made.workers, made.halvings) == (3, 1)
    assert "3 of 4 workers" in made.reason
    assert isinstance(decide(LOST, **NOW | {"slots": 0}), GiveUp)


def test_out_of_memory_halves_the_micro_batch() -> None:
    made = decide(Failure("memory", "worker 0 ran out", 0, 16), **NOW)
    assert isinstance(made, Again)
    assert (made.workers, made.halvings) == (4, 2)
    assert isinstance(decide(Failure("memory", "worker 0 ran out", 0, 1), **NOW), GiveUp)


def test_the_runs_own_error_is_never_retried() -> None:
    assert decide(Failure("error", "KeyError: 'a'"), **NOW) == GiveUp("KeyError: 'a'")


@pytest.mark.parametrize(("failures", "most"), [(4, 3), (1, 0)])
def test_patience_ends(failures: int, most: int) -> None:
    made = decide(LOST, **NOW | {"failures": failures, "max_failures": most})
    assert isinstance(made, GiveUp)
    assert "--max-failures" in made.reason


# Expert hosts

THREE = (0, 1, 2)
ONCE = Tally(failures=1)


def after_loss(
    *lost: int,
    ready: tuple[int, ...] = (),
    coming: tuple[int, ...] = (),
    members: tuple[int, ...] = THREE,
    patient: bool = True,
) -> Regroup | Wait | GiveUp:
    return regroup(
        LOST, HostStatus(members, frozenset(lost), ready, coming), ONCE, max_failures=3, patient=patient
    )


def members_after(*lost: int, **others: Any) -> tuple[int, ...]:
    made = after_loss(*lost, **others)
    assert isinstance(made, Regroup), made
    return made.members


def test_a_spare_takes_the_rank_of_the_lost_host() -> None:
    assert members_after(1, ready=(3,)) == (0, 3, 2)
    assert members_after(0, ready=(3,)) == (3, 1, 2), "the main host like any other"
    assert members_after(2, ready=(3, 4)) == (0, 1, 3)
    assert after_loss(1, ready=(3,)) == Regroup((0, 3, 2), 0, LOST.message)


def test_two_lost_with_one_spare() -> None:
    assert members_after(0, 1, ready=(3,)) == (3, 2)
    assert members_after(1, 2, ready=(3,)) == (0, 3)
    made = after_loss(1, 2, ready=(3,))
    assert isinstance(made, Regroup)
    assert "2 of 3 hosts" in made.reason
    assert "same global batch" in made.reason


def test_two_lost_with_one_spare_and_one_that_comes() -> None:
    made = after_loss(1, 2, ready=(3,), coming=(1, 2))
    assert isinstance(made, Wait)
    assert "waiting for 1 host to" in made.reason
    assert members_after(1, 2, ready=(3,), coming=(1, 2), patient=False) == (0, 3)


def test_the_main_host_is_lost_and_nobody_takes_its_place() -> None:
    assert members_after(0) == (1, 2)


def test_all_are_lost() -> None:
    made = after_loss(*THREE)
    assert isinstance(made, GiveUp)
    assert "no host is left" in made.reason
    assert isinstance(after_loss(*THREE, coming=THREE), Wait)
    assert isinstance(after_loss(*THREE, coming=THREE, patient=False), Wait), (
        "there is nobody who could go on without them"
    )
    assert members_after(*THREE, ready=THREE) == THREE
    assert members_after(*THREE, ready=(4,)) == (4,)
    assert "3 hosts to" in getattr(after_loss(*THREE, coming=THREE), "reason", "")


def test_a_seat_that_was_lost_can_be_taken_again() -> None:
    assert members_after(1, ready=(0, 1, 2)) == THREE, "members that are ready are members already"
    assert members_after(1, 2, ready=(0, 2, 3)) == (0, 2, 3)
    assert members_after(3, ready=(0, 1, 2, 3), members=(0, 3, 2)) == (0, 1, 2)


def test_members_that_live_are_never_spares() -> None:
    assert members_after(1, ready=(0, 2)) == (0, 2)


def test_who_has_only_lost_touch_stays() -> None:
    made = regroup(
        Failure("communication", "lost touch"), HostStatus(THREE, ready=(3,)), ONCE, max_failures=3
    )
    assert made == Regroup(THREE, 0, "lost touch")


def test_nobody_is_waited_for_where_nobody_is_missing() -> None:
    assert members_after(coming=(3,)) == THREE


def test_hosts_out_of_memory_go_on_with_half() -> None:
    ran_out = Failure("memory", "host 0 ran out", 0, 16)
    made = regroup(ran_out, HostStatus(THREE), tallied(ONCE, ran_out, 7), max_failures=3)
    assert made == Regroup(THREE, 1, "host 0 ran out; going on with half of it")


def test_a_micro_batch_of_one_is_not_halved() -> None:
    made = regroup(Failure("memory", "host 0 ran out", 0, 1), HostStatus(THREE), ONCE, max_failures=3)
    assert isinstance(made, GiveUp)
    assert "cannot be halved" in made.reason
    assert "--activation-checkpointing" in made.reason


def test_an_error_of_the_run_is_never_mended() -> None:
    made = regroup(Failure("error", "it diverged"), HostStatus(THREE, ready=(3,)), ONCE, max_failures=3)
    assert made == GiveUp("it diverged")


def test_the_same_fault_twice_at_a_step_is_the_last() -> None:
    fault, seats = Failure("fault", "OSError: once"), HostStatus(THREE)
    assert isinstance(regroup(fault, seats, ONCE, max_failures=3), Regroup)
    made = regroup(fault, seats, ONCE, max_failures=3, repeated=True)
    assert isinstance(made, GiveUp)
    assert "failed twice" in made.reason
    assert isinstance(regroup(LOST, seats, ONCE, max_failures=3, repeated=True), Regroup), (
        "a lost host says nothing of the step"
    )


@pytest.mark.parametrize(
    ("failures", "most", "ends"), [(3, 3, False), (4, 3, True), (1, 0, True), (1, 1, False)]
)
def test_hosts_fail_as_often_as_is_allowed(failures: int, most: int, ends: bool) -> None:
    made = regroup(LOST, HostStatus(THREE, frozenset({1}), (3,)), Tally(failures), max_failures=most)
    assert isinstance(made, GiveUp) == ends
    if ends:
        assert "--max-failures" in made.reason
        assert "--resume auto" in made.reason


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("cause", "others"),
    [
        ("error", ("memory", "worker", "fault", "resources", "communication")),
        ("memory", ("worker", "fault", "resources", "communication")),
        ("worker", ("fault", "resources", "communication")),
        ("fault", ("resources", "communication")),
        ("resources", ("communication",)),
    ],
)
def test_the_cause_is_told_from_what_it_did(cause: Kind, others: tuple[Kind, ...], order: int) -> None:
    failures = [Failure(kind, kind) for kind in (cause, *others)][::order]
    assert worst(failures).kind == cause


def test_of_two_that_are_alike_the_first_is_told() -> None:
    assert (
        worst([Failure("communication", "x"), Failure("worker", "a", 0), Failure("worker", "b", 1)]).rank == 0
    )


def test_what_a_run_has_been_through() -> None:
    tally = tallied(Tally(), LOST, 5)
    assert tally == Tally(1, 0, None)
    tally = tallied(tally, Failure("fault", "once"), 6)
    assert tally == Tally(2, 0, 6)
    tally = tallied(tally, Failure("memory", "ran out"), 9)
    assert tally == Tally(3, 1, 6), "the last fault is not forgotten"
    assert tallied(tally, Failure("fault", "once"), 0) == Tally(4, 1, 0), "step 0 is a step"


# Hosts that stand still


def vital(
    seat: int, phase: str = "step", waiting: bool = False, silent: float = 0.1, still: float = 0.1
) -> HostHealth:
    return HostHealth(seat, phase, waiting, silent, still)


def seats_of(*vitals: HostHealth, slowest: float = 0.0) -> list[int]:
    return [found.host_id for found in stuck(vitals, 10.0, slowest)]


def test_hosts_that_move_are_left_alone() -> None:
    assert seats_of() == []
    assert seats_of(vital(0), vital(1, waiting=True)) == []
    assert seats_of(vital(0, silent=9.0), vital(1, still=10.0)) == [], "as long as it may is not too long"


def test_a_host_that_is_frozen_says_nothing() -> None:
    assert seats_of(vital(0, waiting=True, still=12.0), vital(1, silent=10.1, still=10.1)) == [1]
    assert seats_of(vital(0, waiting=True, still=12.0), vital(1, waiting=True, silent=10.1, still=10.1)) == [
        1
    ], "frozen while it waited"


def test_a_host_that_does_not_get_on_is_stuck_though_it_speaks() -> None:
    assert seats_of(vital(0, waiting=True, still=11.0), vital(1, still=11.0)) == [1]


def test_who_waits_is_not_to_blame() -> None:
    assert (
        seats_of(
            vital(0, waiting=True, still=1000.0), vital(1, waiting=True, still=1000.0), vital(2, still=9.0)
        )
        == []
    )


def test_all_that_wait_for_each_other_are() -> None:
    waiting = [vital(seat, waiting=True, still=10.5) for seat in THREE]
    assert seats_of(*waiting) == [0, 1, 2]
    assert seats_of(*waiting[:2], vital(2, waiting=True, still=9.0)) == [], (
        "the last of them has just begun to"
    )
    assert seats_of(vital(0, waiting=True, still=11.0)) == [0]


def test_a_rest_is_no_standing_still_but_silence_is() -> None:
    assert seats_of(vital(0, "rest", still=500.0)) == []
    assert seats_of(vital(0, "rest", silent=10.5, still=500.0)) == [0]


LONG = {
    "step": 1,
    "rest": 1,
    "join": 6,
    "data": 6,
    "snapshot": 6,
    "evaluate": 12,
    "first step": 60,
    "build": 60,
    "save": 60,
}


@pytest.mark.parametrize("phase", LONG)
def test_long_phases_take_long(phase: str) -> None:
    limit = 10.0 * LONG[phase]
    assert limit_s(phase, 10.0) == limit
    assert seats_of(vital(0, phase, still=limit)) == []
    assert seats_of(vital(0, phase, still=limit + 0.1)) == ([0] if phase != "rest" else [])


@pytest.mark.parametrize("phase", [phase for phase in LONG if phase != "join"])
def test_no_phase_is_so_long_that_a_host_says_nothing(phase: str) -> None:
    """It speaks from beside its work: three times what a step may take is long enough, whatever it is busy with."""
    quiet = min(10.0 * LONG[phase], 30.0)
    assert (
        seats_of(vital(0, phase, silent=0.9 * quiet, still=0.9 * quiet), vital(1, waiting=True, still=quiet))
        == []
    )
    assert seats_of(vital(0, phase, silent=quiet, still=quiet), vital(1, waiting=True, still=quiet)) == [0]


def test_who_has_not_begun_to_speak_has_the_time_to() -> None:
    assert seats_of(vital(0, "join", silent=50.0, still=50.0)) == []
    assert seats_of(vital(0, "join", silent=60.0, still=60.0)) == [0]


def test_slow_steps_raise_the_limit() -> None:
    assert limit_s("step", 10.0, slowest_s=2.0) == 10.0
    assert limit_s("step", 10.0, slowest_s=5.0) == 15.0
    assert limit_s("evaluate", 10.0, slowest_s=50.0) == 150.0
    assert limit_s("a phase of a later version", 10.0) == 10.0
    assert seats_of(vital(0, still=14.0), slowest=5.0) == []
    assert seats_of(vital(0, still=15.5), slowest=5.0) == [0]
