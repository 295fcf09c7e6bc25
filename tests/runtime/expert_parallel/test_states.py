"""The life of a run on expert hosts: one test per arrow of the state machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.runtime.expert_parallel.states import (
    Advance,
    AllClosed,
    AllJoined,
    Apart,
    Broken,
    Close,
    Closing,
    Happening,
    HostsReady,
    Join,
    Joining,
    Leave,
    Leaving,
    OutOfTime,
    Over,
    Replace,
    RunEnded,
    SegmentDone,
    Starting,
    State,
    Terms,
    Training,
    Waiting,
    after,
)
from orchestrator.runtime.recovery import Failure, GiveUp, HostStatus, Tally

TERMS = Terms(wanted=3, max_failures=3)
MEMBERS = (0, 1, 2)
ONCE = Tally(failures=1)
LOST = Failure("worker", "host 1 was lost", 1)
FAULT = Failure("fault", "host 1: OSError: once", 1)
JOINING, TRAINING, LEAVING = Joining(4, MEMBERS, ONCE), Training(4, MEMBERS, ONCE), Leaving(4, MEMBERS, ONCE)
WAITING = Waiting(4, HostStatus(MEMBERS, frozenset({1}), (), (1,)), ONCE, LOST)
STATES: tuple[State, ...] = (
    Starting(),
    JOINING,
    TRAINING,
    LEAVING,
    WAITING,
    Closing("completed"),
    Over("completed"),
)
HAPPENINGS: tuple[Happening, ...] = (
    HostsReady((0, 1, 2, 3)),
    OutOfTime("no CPUs"),
    AllJoined(),
    SegmentDone(),
    RunEnded("completed"),
    AllClosed(),
    Broken(),
    Apart((LOST,), HostStatus(MEMBERS, frozenset({1}), (3,)), 7),
)
ARROWS = {
    (Starting, HostsReady),
    (Starting, OutOfTime),
    (Joining, AllJoined),
    (Joining, Broken),
    (Training, SegmentDone),
    (Training, RunEnded),
    (Training, Broken),
    (Leaving, Apart),
    (Waiting, HostsReady),
    (Closing, AllClosed),
}
KEPT = [
    (state, happening)
    for state in STATES
    for happening in HAPPENINGS
    if (type(state), type(happening)) not in ARROWS
]


def apart(
    *failures: Failure,
    lost: tuple[int, ...] = (),
    ready: tuple[int, ...] = (),
    coming: tuple[int, ...] = (),
    step: int = 7,
) -> Apart:
    return Apart(failures or (LOST,), HostStatus(MEMBERS, frozenset(lost), ready, coming), step)


@pytest.mark.parametrize(("state", "happening"), KEPT, ids=lambda value: type(value).__name__)
def test_what_does_not_concern_a_state_leaves_it(state: State, happening: Happening) -> None:
    assert after(state, happening, TERMS) == (state, ())


# Starting


def test_hosts_join_when_enough_are_ready() -> None:
    assert after(Starting(), HostsReady(MEMBERS), TERMS) == (Joining(0, MEMBERS), (Join(0, MEMBERS),))


def test_spares_are_not_members() -> None:
    assert after(Starting(), HostsReady((0, 2, 3, 4)), TERMS) == (
        Joining(0, (0, 2, 3)),
        (Join(0, (0, 2, 3)),),
    )


def test_too_few_hosts_are_waited_for() -> None:
    assert after(Starting(), HostsReady((0, 1), coming=(2,)), TERMS) == (Starting(), ())
    assert after(Starting(), HostsReady((0, 1), patient=False), TERMS) == (Starting(), ())


def test_hosts_that_are_not_to_be_had_end_the_run() -> None:
    over, commands = after(Starting(), OutOfTime("3 CPUs were not to be had"), TERMS)
    assert over == Over(
        failure=Failure("resources", "3 CPUs were not to be had"),
        given_up=GiveUp("3 CPUs were not to be had"),
    )
    assert commands == ()


# Joining


def test_all_that_joined_train() -> None:
    assert after(JOINING, AllJoined(), TERMS) == (TRAINING, (Advance(),))


def test_a_failure_while_joining_makes_all_leave() -> None:
    assert after(JOINING, Broken(), TERMS) == (LEAVING, (Leave(4, MEMBERS),))


# Training


def test_a_segment_follows_the_other() -> None:
    assert after(TRAINING, SegmentDone(), TERMS) == (TRAINING, (Advance(),))
    assert after(TRAINING, SegmentDone((0, 1, 2, 3)), TERMS) == (TRAINING, (Advance(),)), (
        "a spare is no reason to stop"
    )


def test_a_failure_while_training_makes_all_leave() -> None:
    assert after(TRAINING, Broken(), TERMS) == (LEAVING, (Leave(4, MEMBERS),))


def test_the_end_closes_the_members() -> None:
    assert after(TRAINING, RunEnded("stopped"), TERMS) == (Closing("stopped"), (Close(MEMBERS),))


def test_fewer_hosts_than_wanted_keep_a_copy_and_then_grow() -> None:
    few = Training(4, (0, 2), replace(ONCE, halvings=1))
    keeping, commands = after(few, SegmentDone((0, 1, 2, 3)), TERMS)
    assert (keeping, commands) == (replace(few, keeping=True), (Advance(keep=True),))
    grown, (join,) = after(keeping, SegmentDone((0, 1, 2, 3)), TERMS)
    assert grown == Joining(5, (0, 2, 1), few.tally)
    assert isinstance(join, Join)
    assert (join.generation, join.members, join.halvings, join.failure) == (5, (0, 2, 1), 1, None)
    assert "3 hosts instead of 2" in join.reason


def test_it_grows_by_as_many_as_are_ready() -> None:
    grown, _ = after(Training(4, (2,), keeping=True), SegmentDone((0, 2)), TERMS)
    assert grown == Joining(5, (2, 0))


def test_a_host_that_was_ready_and_is_gone_is_not_waited_for() -> None:
    few = Training(4, (0, 2), ONCE)
    assert after(replace(few, keeping=True), SegmentDone((0, 2)), TERMS) == (few, (Advance(),))


def test_without_copies_it_does_not_grow() -> None:
    few = Training(4, (0, 2), ONCE)
    assert after(few, SegmentDone((0, 1, 2)), replace(TERMS, grows=False)) == (few, (Advance(),))


def test_a_failure_before_it_has_grown_is_a_failure_of_the_few() -> None:
    assert after(Training(4, (0, 2), ONCE, keeping=True), Broken(), TERMS) == (
        Leaving(4, (0, 2), ONCE),
        (Leave(4, (0, 2)),),
    )


# Leaving


def test_a_spare_takes_the_place_of_a_lost_host() -> None:
    joining, commands = after(LEAVING, apart(lost=(1,), ready=(3,)), TERMS)
    assert joining == Joining(5, (0, 3, 2), Tally(failures=2))
    assert commands == (Replace(frozenset({1})), Join(5, (0, 3, 2), 0, LOST, "host 1 was lost"))


def test_without_a_spare_another_is_started_and_waited_for() -> None:
    waiting, commands = after(LEAVING, apart(lost=(1,), coming=(1,)), TERMS)
    reason = "host 1 was lost; waiting for 1 host to take over"
    assert waiting == Waiting(
        4, HostStatus(MEMBERS, frozenset({1}), (), (1,)), Tally(failures=2), LOST, reason
    )
    assert commands == (Replace(frozenset({1})),)


def test_without_anyone_to_wait_for_the_others_go_on() -> None:
    joining, commands = after(LEAVING, apart(lost=(1,)), TERMS)
    assert joining == Joining(5, (0, 2), Tally(failures=2))
    assert commands[0] == Replace(frozenset({1})), "its node may come back"
    assert isinstance(commands[1], Join)
    assert "2 of 3 hosts" in commands[1].reason


def test_impatience_goes_on_with_fewer() -> None:
    joining, _ = after(LEAVING, replace(apart(lost=(1,), coming=(1,)), patient=False), TERMS)
    assert joining == Joining(5, (0, 2), Tally(failures=2))


def test_hosts_that_only_lost_touch_join_again() -> None:
    touch = Failure("communication", "lost touch")
    assert after(LEAVING, apart(touch, touch), TERMS) == (
        Joining(5, MEMBERS, Tally(failures=2)),
        (Join(5, MEMBERS, 0, touch, "lost touch"),),
    )


def test_the_cause_counts_and_not_what_it_did_to_the_others() -> None:
    touch = Failure("communication", "lost touch")
    _, commands = after(LEAVING, apart(touch, LOST, touch, lost=(1,), ready=(3,)), TERMS)
    assert isinstance(commands[-1], Join)
    assert commands[-1].failure == LOST


def test_out_of_memory_halves_the_micro_batch() -> None:
    memory = Failure("memory", "host 2 ran out", 2, 8)
    joining, (join,) = after(LEAVING, apart(memory), TERMS)
    assert joining == Joining(5, MEMBERS, Tally(failures=2, halvings=1))
    assert isinstance(join, Join)
    assert join.halvings == 1
    later, (again,) = after(Leaving(5, MEMBERS, Tally(2, 1)), apart(replace(memory, micro_batch=4)), TERMS)
    assert later == Joining(6, MEMBERS, Tally(failures=3, halvings=2))
    assert isinstance(again, Join)
    assert again.halvings == 2


def test_the_runs_own_error_ends_it() -> None:
    error = Failure("error", "the loss diverged", 0)
    assert after(LEAVING, apart(error), TERMS) == (
        Over(failure=error, given_up=GiveUp("the loss diverged")),
        (),
    )


def test_one_failure_too_many_ends_it() -> None:
    over, commands = after(Leaving(4, MEMBERS, Tally(failures=3)), apart(lost=(1,), ready=(3,)), TERMS)
    assert isinstance(over, Over)
    assert over.failure == LOST
    assert over.given_up is not None
    assert "--max-failures is 3" in over.given_up.reason
    assert commands == ()
    allowed, _ = after(Leaving(4, MEMBERS, Tally(failures=2)), apart(lost=(1,), ready=(3,)), TERMS)
    assert isinstance(allowed, Joining)


def test_all_lost_and_nobody_comes_ends_it() -> None:
    over, _ = after(LEAVING, apart(lost=MEMBERS), TERMS)
    assert isinstance(over, Over)
    assert over.given_up is not None
    assert "no host is left" in over.given_up.reason


def test_an_unknown_fault_may_happen_once_at_a_step() -> None:
    joining, _ = after(LEAVING, apart(FAULT), TERMS)
    assert joining == Joining(5, MEMBERS, Tally(failures=2, faulty_step=7))
    elsewhere, _ = after(Leaving(5, MEMBERS, Tally(2, faulty_step=7)), apart(FAULT, step=8), TERMS)
    assert elsewhere == Joining(6, MEMBERS, Tally(failures=3, faulty_step=8))
    over, commands = after(Leaving(5, MEMBERS, Tally(2, faulty_step=7)), apart(FAULT), TERMS)
    assert (over, commands) == (
        Over(failure=FAULT, given_up=GiveUp("host 1: OSError: once; the same step failed twice")),
        (),
    )


def test_another_failure_at_the_step_of_a_fault_is_no_repetition() -> None:
    joining, _ = after(Leaving(5, MEMBERS, Tally(1, faulty_step=7)), apart(lost=(1,), ready=(3,)), TERMS)
    assert joining == Joining(6, (0, 3, 2), Tally(failures=2, faulty_step=7))


# Waiting


def test_the_host_that_was_waited_for_takes_its_seat() -> None:
    joining, commands = after(WAITING, HostsReady((0, 1, 2)), TERMS)
    assert joining == Joining(5, MEMBERS, ONCE), "the failure is counted already"
    assert commands == (Join(5, MEMBERS, 0, LOST, "host 1 was lost"),)


def test_it_waits_on_while_someone_comes() -> None:
    assert after(WAITING, HostsReady((0, 2), (1,)), TERMS) == (
        replace(WAITING, seats=HostStatus(MEMBERS, frozenset({1}), (0, 2), (1,))),
        (),
    )


def test_a_spare_that_is_there_first_takes_the_seat() -> None:
    joining, _ = after(WAITING, HostsReady((0, 2, 3), (1,)), TERMS)
    assert joining == Joining(5, (0, 3, 2), ONCE)


def test_nobody_comes_any_more() -> None:
    joining, (join,) = after(WAITING, HostsReady((0, 2)), TERMS)
    assert joining == Joining(5, (0, 2), ONCE)
    assert isinstance(join, Join)
    assert join.failure == LOST


def test_it_does_not_wait_for_ever() -> None:
    joining, _ = after(WAITING, HostsReady((0, 2), (1,), patient=False), TERMS)
    assert joining == Joining(5, (0, 2), ONCE)


def test_waiting_for_all_in_vain_ends_it() -> None:
    alone = replace(WAITING, seats=HostStatus(MEMBERS, frozenset(MEMBERS), (), MEMBERS))
    assert after(alone, HostsReady((), MEMBERS, patient=False), TERMS) == (alone, ()), (
        "nobody could go on without them"
    )
    over, commands = after(alone, HostsReady((), (), patient=False), TERMS)
    assert isinstance(over, Over)
    assert over.failure == LOST
    assert commands == ()


def test_what_memory_was_halved_to_is_not_forgotten_while_waiting() -> None:
    _, (join,) = after(replace(WAITING, tally=Tally(2, halvings=2)), HostsReady(MEMBERS), TERMS)
    assert isinstance(join, Join)
    assert join.halvings == 2


# Closing


def test_a_run_that_is_done_is_over_when_its_hosts_are() -> None:
    assert after(Closing("completed"), AllClosed(), TERMS) == (Over("completed"), ())
