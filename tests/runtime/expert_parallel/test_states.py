"""The state machine of a run on expert hosts: one test per transition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.runtime.expert_parallel.states import (
    AllClosed,
    AllJoined,
    CloseHosts,
    Closing,
    Ended,
    Event,
    FailureSeen,
    GroupStopped,
    HostsReady,
    JoinGroup,
    Joining,
    LeaveGroup,
    Leaving,
    ReplaceHosts,
    RunFinished,
    RunLimits,
    Running,
    RunSegment,
    SegmentDone,
    StartFailed,
    Starting,
    State,
    WaitingForHosts,
    next_state,
)
from orchestrator.runtime.recovery import Failure, FailureHistory, GiveUp, HostStatus
from orchestrator.types import Choice

LIMITS = RunLimits(num_hosts=3, max_failures=3)
MEMBERS = (0, 1, 2)
ONCE = FailureHistory((7,))
TWICE = FailureHistory((7, 7))
LOST = Failure("worker", "host 1 was lost", 1)
FAULT = Failure("fault", "host 1: OSError: once", 1)
JOINING = Joining(4, MEMBERS, ONCE)
RUNNING = Running(4, MEMBERS, ONCE)
LEAVING = Leaving(4, MEMBERS, ONCE)
WAITING = WaitingForHosts(4, HostStatus(MEMBERS, frozenset({1}), (), (1,)), ONCE, LOST)
STATES: tuple[State, ...] = (
    Starting(),
    JOINING,
    RUNNING,
    LEAVING,
    WAITING,
    Closing("completed"),
    Ended("completed"),
)
EVENTS: tuple[Event, ...] = (
    HostsReady((0, 1, 2, 3)),
    StartFailed("no CPUs"),
    AllJoined(),
    SegmentDone(),
    RunFinished("completed"),
    AllClosed(),
    FailureSeen(),
    GroupStopped((LOST,), HostStatus(MEMBERS, frozenset({1}), (3,)), 7),
)
TRANSITIONS = {
    (Starting, HostsReady),
    (Starting, StartFailed),
    (Joining, AllJoined),
    (Joining, FailureSeen),
    (Running, SegmentDone),
    (Running, RunFinished),
    (Running, FailureSeen),
    (Leaving, GroupStopped),
    (WaitingForHosts, HostsReady),
    (Closing, AllClosed),
}
IGNORED = [
    (state, event) for state in STATES for event in EVENTS if (type(state), type(event)) not in TRANSITIONS
]


def stopped(
    *failures: Failure,
    lost: tuple[int, ...] = (),
    ready: tuple[int, ...] = (),
    starting: tuple[int, ...] = (),
    step: int = 7,
) -> GroupStopped:
    hosts = HostStatus(MEMBERS, frozenset(lost), ready, starting)
    return GroupStopped(failures or (LOST,), hosts, step)


@pytest.mark.parametrize(("state", "event"), IGNORED, ids=lambda value: type(value).__name__)
def test_other_events_leave_a_state_unchanged(state: State, event: Event) -> None:
    assert next_state(state, event, LIMITS) == (state, ())


# Starting


def test_hosts_join_when_enough_are_ready() -> None:
    joining, commands = next_state(Starting(), HostsReady(MEMBERS), LIMITS)
    assert joining == Joining(0, MEMBERS)
    assert commands == (JoinGroup(0, MEMBERS),)


def test_spares_are_not_members() -> None:
    joining, commands = next_state(Starting(), HostsReady((0, 2, 3, 4)), LIMITS)
    assert joining == Joining(0, (0, 2, 3))
    assert commands == (JoinGroup(0, (0, 2, 3)),)


def test_too_few_hosts_are_waited_for() -> None:
    assert next_state(Starting(), HostsReady((0, 1), starting=(2,)), LIMITS) == (Starting(), ())
    assert next_state(Starting(), HostsReady((0, 1), may_wait=False), LIMITS) == (Starting(), ())


def test_hosts_that_cannot_be_started_end_the_run() -> None:
    message = "3 CPUs were not available"
    ended, commands = next_state(Starting(), StartFailed(message), LIMITS)
    assert ended == Ended(failure=Failure("resources", message), given_up=GiveUp(message))
    assert commands == ()


# Joining


def test_a_newcomer_that_cannot_join_does_not_count_towards_max_failures() -> None:
    unfit = Failure("worker", "host 1 could not join: no such data", 1, loss="unfit")
    state, _ = next_state(LEAVING, stopped(unfit, lost=(1,)), RunLimits(num_hosts=3, max_failures=1))
    assert state == Joining(5, (0, 2), ONCE)
    both = stopped(Failure("worker", "host 0 was lost", 0, loss="died"), unfit, lost=(0, 1))
    state, _ = next_state(LEAVING, both, RunLimits(num_hosts=3, max_failures=1))
    assert isinstance(state, Ended), "the loss of a member counts"


def test_members_that_have_joined_run_a_segment() -> None:
    assert next_state(JOINING, AllJoined(), LIMITS) == (RUNNING, (RunSegment(),))


def test_a_failure_while_joining_makes_all_leave() -> None:
    assert next_state(JOINING, FailureSeen(), LIMITS) == (LEAVING, (LeaveGroup(4, MEMBERS),))


# Running


def test_one_segment_follows_the_other() -> None:
    assert next_state(RUNNING, SegmentDone(), LIMITS) == (RUNNING, (RunSegment(),))
    with_spare = SegmentDone((0, 1, 2, 3))
    assert next_state(RUNNING, with_spare, LIMITS) == (RUNNING, (RunSegment(),)), "a spare changes nothing"


def test_a_failure_while_running_makes_all_leave() -> None:
    assert next_state(RUNNING, FailureSeen(), LIMITS) == (LEAVING, (LeaveGroup(4, MEMBERS),))


def test_the_end_of_the_run_closes_the_members() -> None:
    assert next_state(RUNNING, RunFinished("stopped"), LIMITS) == (Closing("stopped"), (CloseHosts(MEMBERS),))


def test_a_group_that_is_too_small_takes_a_snapshot_and_then_grows() -> None:
    small = Running(4, (0, 2), replace(ONCE, halvings=1))
    ready = SegmentDone((0, 1, 2, 3))
    last_segment, commands = next_state(small, ready, LIMITS)
    assert last_segment == replace(small, snapshot_at_end=True)
    assert commands == (RunSegment(snapshot_at_end=True),)
    joining, (join,) = next_state(last_segment, ready, LIMITS)
    assert joining == Joining(5, (0, 2, 1), small.history)
    assert isinstance(join, JoinGroup)
    assert (join.generation, join.members, join.halvings, join.failure) == (5, (0, 2, 1), 1, None)
    assert "3 hosts instead of 2" in join.reason


def test_hosts_that_come_back_get_the_expert_groups_of_their_number() -> None:
    limits = replace(LIMITS, groups={2: Choice(1, "one"), 3: Choice(3, "as asked")})
    last_segment = Running(4, (0, 2), snapshot_at_end=True)
    _, (join,) = next_state(last_segment, SegmentDone((0, 1, 2)), limits)
    assert isinstance(join, JoinGroup)
    assert join.reason.endswith("available, and with the experts in 3 groups instead of 1: as asked")


def test_a_group_grows_by_the_hosts_that_are_ready() -> None:
    joining, _ = next_state(Running(4, (2,), snapshot_at_end=True), SegmentDone((0, 2)), LIMITS)
    assert joining == Joining(5, (2, 0))


def test_a_host_that_was_ready_and_is_gone_is_not_waited_for() -> None:
    small = Running(4, (0, 2), ONCE)
    last_segment = replace(small, snapshot_at_end=True)
    assert next_state(last_segment, SegmentDone((0, 2)), LIMITS) == (small, (RunSegment(),))


def test_without_snapshots_a_group_does_not_grow() -> None:
    small = Running(4, (0, 2), ONCE)
    limits = replace(LIMITS, can_grow=False)
    assert next_state(small, SegmentDone((0, 1, 2)), limits) == (small, (RunSegment(),))


def test_a_failure_before_a_group_has_grown_is_one_of_the_small_group() -> None:
    small = Running(4, (0, 2), ONCE, snapshot_at_end=True)
    leaving, commands = next_state(small, FailureSeen(), LIMITS)
    assert leaving == Leaving(4, (0, 2), ONCE)
    assert commands == (LeaveGroup(4, (0, 2)),)


# Leaving


def test_a_spare_takes_the_rank_of_a_lost_host() -> None:
    joining, commands = next_state(LEAVING, stopped(lost=(1,), ready=(3,)), LIMITS)
    assert joining == Joining(5, (0, 3, 2), TWICE)
    join = JoinGroup(5, (0, 3, 2), 0, LOST, "host 1 was lost")
    assert commands == (ReplaceHosts(frozenset({1})), join)


def test_without_a_spare_a_new_host_is_started_and_waited_for() -> None:
    waiting, commands = next_state(LEAVING, stopped(lost=(1,), starting=(1,)), LIMITS)
    reason = "host 1 was lost; waiting for 1 host to take over"
    hosts = HostStatus(MEMBERS, frozenset({1}), (), (1,))
    assert waiting == WaitingForHosts(4, hosts, TWICE, LOST, reason)
    assert commands == (ReplaceHosts(frozenset({1})),)


def test_without_a_host_to_wait_for_the_others_go_on() -> None:
    joining, commands = next_state(LEAVING, stopped(lost=(1,)), LIMITS)
    assert joining == Joining(5, (0, 2), TWICE)
    assert commands[0] == ReplaceHosts(frozenset({1})), "its node may come back"
    assert isinstance(commands[1], JoinGroup)
    assert "2 of 3 hosts" in commands[1].reason


def test_hosts_that_only_lost_contact_join_again() -> None:
    no_contact = Failure("communication", "lost contact")
    joining, commands = next_state(LEAVING, stopped(no_contact, no_contact), LIMITS)
    assert joining == Joining(5, MEMBERS, TWICE)
    assert commands == (JoinGroup(5, MEMBERS, 0, no_contact, "lost contact"),)


def test_the_root_cause_decides() -> None:
    no_contact = Failure("communication", "lost contact")
    event = stopped(no_contact, LOST, no_contact, lost=(1,), ready=(3,))
    _, commands = next_state(LEAVING, event, LIMITS)
    assert isinstance(commands[-1], JoinGroup)
    assert commands[-1].failure == LOST


def test_out_of_memory_halves_the_micro_batch() -> None:
    exhausted = Failure("memory", "host 2 ran out", 2, 8)
    joining, (join,) = next_state(LEAVING, stopped(exhausted), LIMITS)
    assert joining == Joining(5, MEMBERS, FailureHistory((7, 7), halvings=1))
    assert isinstance(join, JoinGroup)
    assert join.halvings == 1
    leaving = Leaving(5, MEMBERS, FailureHistory((7, 7), 1))
    later, (join,) = next_state(leaving, stopped(replace(exhausted, micro_batch=4)), LIMITS)
    assert later == Joining(6, MEMBERS, FailureHistory((7, 7, 7), halvings=2))
    assert isinstance(join, JoinGroup)
    assert join.halvings == 2


def test_an_error_of_the_run_itself_ends_it() -> None:
    error = Failure("error", "the loss diverged", 0)
    ended, commands = next_state(LEAVING, stopped(error), LIMITS)
    assert ended == Ended(failure=error, given_up=GiveUp("the loss diverged"))
    assert commands == ()


def test_one_failure_too_many_ends_the_run() -> None:
    event = stopped(lost=(1,), ready=(3,))
    ended, commands = next_state(Leaving(4, MEMBERS, FailureHistory((7, 7, 7))), event, LIMITS)
    assert isinstance(ended, Ended)
    assert ended.failure == LOST
    assert ended.given_up is not None
    assert "--max-failures is 3" in ended.given_up.reason
    assert commands == ()
    allowed, _ = next_state(Leaving(4, MEMBERS, FailureHistory((7, 7))), event, LIMITS)
    assert isinstance(allowed, Joining)


def test_the_loss_of_all_hosts_without_replacements_ends_the_run() -> None:
    ended, _ = next_state(LEAVING, stopped(lost=MEMBERS), LIMITS)
    assert isinstance(ended, Ended)
    assert ended.given_up is not None
    assert "no host is left" in ended.given_up.reason


def test_an_unknown_fault_may_happen_once_at_a_step() -> None:
    joining, _ = next_state(LEAVING, stopped(FAULT), LIMITS)
    assert joining == Joining(5, MEMBERS, FailureHistory((7, 7), faulty_step=7))
    leaving = Leaving(5, MEMBERS, FailureHistory((7, 7), faulty_step=7))
    elsewhere, _ = next_state(leaving, stopped(FAULT, step=8), LIMITS)
    assert elsewhere == Joining(6, MEMBERS, FailureHistory((7, 7, 8), faulty_step=8))
    ended, commands = next_state(leaving, stopped(FAULT), LIMITS)
    reason = "host 1: OSError: once; the same step failed twice"
    assert ended == Ended(failure=FAULT, given_up=GiveUp(reason))
    assert commands == ()


def test_another_failure_at_the_step_of_a_fault_is_no_repetition() -> None:
    leaving = Leaving(5, MEMBERS, FailureHistory((7,), faulty_step=7))
    joining, _ = next_state(leaving, stopped(lost=(1,), ready=(3,)), LIMITS)
    assert joining == Joining(6, (0, 3, 2), FailureHistory((7, 7), faulty_step=7))


# WaitingForHosts


def test_the_awaited_host_takes_the_rank() -> None:
    joining, commands = next_state(WAITING, HostsReady((0, 1, 2)), LIMITS)
    assert joining == Joining(5, MEMBERS, ONCE), "the failure is counted already"
    assert commands == (JoinGroup(5, MEMBERS, 0, LOST, "host 1 was lost"),)


def test_waiting_goes_on_while_a_host_is_being_started() -> None:
    waiting, commands = next_state(WAITING, HostsReady((0, 2), (1,)), LIMITS)
    assert waiting == replace(WAITING, hosts=HostStatus(MEMBERS, frozenset({1}), (0, 2), (1,)))
    assert commands == ()


def test_a_spare_that_is_ready_first_takes_the_rank() -> None:
    joining, _ = next_state(WAITING, HostsReady((0, 2, 3), (1,)), LIMITS)
    assert joining == Joining(5, (0, 3, 2), ONCE)


def test_waiting_ends_when_no_host_is_being_started() -> None:
    joining, (join,) = next_state(WAITING, HostsReady((0, 2)), LIMITS)
    assert joining == Joining(5, (0, 2), ONCE)
    assert isinstance(join, JoinGroup)
    assert join.failure == LOST


def test_waiting_ends_when_time_is_up() -> None:
    joining, _ = next_state(WAITING, HostsReady((0, 2), (1,), may_wait=False), LIMITS)
    assert joining == Joining(5, (0, 2), ONCE)


def test_waiting_for_all_hosts_ends_the_run_only_when_none_is_being_started() -> None:
    all_lost = replace(WAITING, hosts=HostStatus(MEMBERS, frozenset(MEMBERS), (), MEMBERS))
    late = HostsReady((), MEMBERS, may_wait=False)
    assert next_state(all_lost, late, LIMITS) == (all_lost, ()), "no one could go on without them"
    ended, commands = next_state(all_lost, HostsReady((), (), may_wait=False), LIMITS)
    assert isinstance(ended, Ended)
    assert ended.failure == LOST
    assert commands == ()


def test_halvings_are_kept_while_waiting() -> None:
    waiting = replace(WAITING, history=FailureHistory((7, 7), halvings=2))
    _, (join,) = next_state(waiting, HostsReady(MEMBERS), LIMITS)
    assert isinstance(join, JoinGroup)
    assert join.halvings == 2


# Closing


def test_a_finished_run_has_ended_when_its_hosts_are_closed() -> None:
    assert next_state(Closing("completed"), AllClosed(), LIMITS) == (Ended("completed"), ())
