"""The decisions after a failure, one test per case, and the search for stuck hosts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runtime.recovery import (
    PROGRESS_WINDOW,
    Failure,
    FailureHistory,
    FailureKind,
    GiveUp,
    HostStatus,
    Regroup,
    Restart,
    Wait,
    decide_regroup,
    decide_restart,
    root_cause,
)
from orchestrator.types import Choice

LOST = Failure("worker", "worker 1 was lost", 1)


# Restarts of all workers


def decide(failure: Failure, failures: int = 1, max_failures: int = 3, slots: int = 4) -> Restart | GiveUp:
    """Decide on the restart of four workers whose micro-batch was halved once before the failure."""
    earlier = FailureHistory((5,) * (failures - 1), halvings=1)
    history = earlier.with_failure(failure, 5)
    return decide_restart(failure, history, max_failures=max_failures, workers=4, slots=slots)


def test_a_lost_worker_is_replaced() -> None:
    assert decide(LOST) == Restart(4, 1, "worker 1 was lost")
    assert isinstance(decide(Failure("communication", "lost contact")), Restart)
    assert isinstance(decide(Failure("resources", "start timed out")), Restart)


def test_a_lost_node_leaves_fewer_workers() -> None:
    decision = decide(LOST, slots=3)
    assert isinstance(decision, Restart)
    assert (decision.workers, decision.halvings) == (3, 1)
    assert "3 of 4 workers" in decision.reason
    assert isinstance(decide(LOST, slots=0), GiveUp)


def test_out_of_memory_halves_the_micro_batch() -> None:
    decision = decide(Failure("memory", "worker 0 ran out", 0, 16))
    assert isinstance(decision, Restart)
    assert (decision.workers, decision.halvings) == (4, 2)
    assert isinstance(decide(Failure("memory", "worker 0 ran out", 0, 1)), GiveUp)


@pytest.mark.parametrize("kind", ["error", "fault"])
def test_errors_and_faults_are_never_retried_by_a_restart(kind: FailureKind) -> None:
    assert decide(Failure(kind, "KeyError: 'a'")) == GiveUp("KeyError: 'a'")


@pytest.mark.parametrize(("failures", "max_failures"), [(4, 3), (1, 0)])
def test_restarts_are_limited(failures: int, max_failures: int) -> None:
    decision = decide(LOST, failures, max_failures)
    assert isinstance(decision, GiveUp)
    assert "--max-failures" in decision.reason


# New groups of expert hosts

THREE = (0, 1, 2)
ONCE = FailureHistory((5,))


def after_loss(
    *lost: int,
    ready: tuple[int, ...] = (),
    starting: tuple[int, ...] = (),
    members: tuple[int, ...] = THREE,
    may_wait: bool = True,
) -> Regroup | Wait | GiveUp:
    hosts = HostStatus(members, frozenset(lost), ready, starting)
    return decide_regroup(LOST, hosts, ONCE, max_failures=3, may_wait=may_wait)


def members_after(*lost: int, **others: Any) -> tuple[int, ...]:
    decision = after_loss(*lost, **others)
    assert isinstance(decision, Regroup), decision
    return decision.members


def test_a_spare_takes_the_rank_of_the_lost_host() -> None:
    assert members_after(1, ready=(3,)) == (0, 3, 2)
    assert members_after(0, ready=(3,)) == (3, 1, 2), "the main host like any other"
    assert members_after(2, ready=(3, 4)) == (0, 1, 3)
    assert after_loss(1, ready=(3,)) == Regroup((0, 3, 2), 0, LOST.message)


def test_one_spare_replaces_the_first_of_two_lost_hosts() -> None:
    assert members_after(0, 1, ready=(3,)) == (3, 2)
    assert members_after(1, 2, ready=(3,)) == (0, 3)
    decision = after_loss(1, 2, ready=(3,))
    assert isinstance(decision, Regroup)
    assert "2 of 3 hosts" in decision.reason
    assert "same global batch" in decision.reason


def test_a_host_that_is_being_started_is_waited_for_unless_time_is_up() -> None:
    decision = after_loss(1, 2, ready=(3,), starting=(1, 2))
    assert isinstance(decision, Wait)
    assert "waiting for 1 host to" in decision.reason
    assert members_after(1, 2, ready=(3,), starting=(1, 2), may_wait=False) == (0, 3)


def test_the_others_go_on_without_the_main_host() -> None:
    assert members_after(0) == (1, 2)


def test_the_loss_of_all_hosts() -> None:
    decision = after_loss(*THREE)
    assert isinstance(decision, GiveUp)
    assert "no host is left" in decision.reason
    waiting = after_loss(*THREE, starting=THREE)
    assert isinstance(waiting, Wait)
    assert "3 hosts to" in waiting.reason
    assert isinstance(after_loss(*THREE, starting=THREE, may_wait=False), Wait), (
        "no one could go on without them"
    )
    assert members_after(*THREE, ready=THREE) == THREE
    assert members_after(*THREE, ready=(4,)) == (4,)


def test_a_lost_host_id_can_be_used_again() -> None:
    assert members_after(1, ready=(0, 1, 2)) == THREE, "members that are ready are members already"
    assert members_after(1, 2, ready=(0, 2, 3)) == (0, 2, 3)
    assert members_after(3, ready=(0, 1, 2, 3), members=(0, 3, 2)) == (0, 1, 2)


def test_living_members_are_never_spares() -> None:
    assert members_after(1, ready=(0, 2)) == (0, 2)


def test_hosts_that_lost_contact_stay_members() -> None:
    failure = Failure("communication", "lost contact")
    decision = decide_regroup(failure, HostStatus(THREE, ready=(3,)), ONCE, max_failures=3)
    assert decision == Regroup(THREE, 0, "lost contact")


def test_the_reason_says_how_the_expert_groups_change() -> None:
    groups = {3: Choice(3, "as asked"), 2: Choice(1, "the experts fit"), 1: Choice(1, "one host")}
    hosts = HostStatus(THREE, frozenset({1}))
    decision = decide_regroup(LOST, hosts, ONCE, max_failures=3, groups=groups)
    assert isinstance(decision, Regroup)
    assert decision.reason.endswith(
        "2 of 3 hosts with the same global batch, and with the experts in 1 group instead of 3: "
        "the experts fit"
    )
    same = decide_regroup(LOST, HostStatus((0, 1), frozenset({1})), ONCE, max_failures=3, groups=groups)
    assert isinstance(same, Regroup)
    assert same.reason.endswith("with the same global batch")


def test_a_complete_group_waits_for_no_one() -> None:
    assert members_after(starting=(3,)) == THREE


def test_hosts_out_of_memory_continue_with_half_the_micro_batch() -> None:
    exhausted = Failure("memory", "host 0 ran out", 0, 16)
    history = ONCE.with_failure(exhausted, 7)
    decision = decide_regroup(exhausted, HostStatus(THREE), history, max_failures=3)
    assert decision == Regroup(THREE, 1, "host 0 ran out; continuing with half the micro-batch")


def test_a_micro_batch_of_one_is_not_halved() -> None:
    exhausted = Failure("memory", "host 0 ran out", 0, 1)
    decision = decide_regroup(exhausted, HostStatus(THREE), ONCE, max_failures=3)
    assert isinstance(decision, GiveUp)
    assert "cannot be halved" in decision.reason
    assert "--activation-checkpointing" in decision.reason


def test_an_error_of_the_run_is_never_retried_by_a_new_group() -> None:
    hosts = HostStatus(THREE, ready=(3,))
    decision = decide_regroup(Failure("error", "it diverged"), hosts, ONCE, max_failures=3)
    assert decision == GiveUp("it diverged")


def test_a_fault_that_repeats_at_the_same_step_is_final() -> None:
    fault = Failure("fault", "OSError: once")
    hosts = HostStatus(THREE)
    assert isinstance(decide_regroup(fault, hosts, ONCE, max_failures=3), Regroup)
    decision = decide_regroup(fault, hosts, ONCE, max_failures=3, repeated=True)
    assert isinstance(decision, GiveUp)
    assert "failed twice" in decision.reason
    assert isinstance(decide_regroup(LOST, hosts, ONCE, max_failures=3, repeated=True), Regroup), (
        "a lost host says nothing about the step"
    )


@pytest.mark.parametrize(
    ("failures", "max_failures", "gives_up"),
    [(3, 3, False), (4, 3, True), (1, 0, True), (1, 1, False)],
)
def test_new_groups_are_limited(failures: int, max_failures: int, gives_up: bool) -> None:
    hosts = HostStatus(THREE, frozenset({1}), (3,))
    decision = decide_regroup(LOST, hosts, FailureHistory((5,) * failures), max_failures=max_failures)
    assert isinstance(decision, GiveUp) == gives_up
    if isinstance(decision, GiveUp):
        assert "--max-failures" in decision.reason
        assert decision.can_resume


# Failures


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
def test_the_root_cause_is_found_in_any_order(
    cause: FailureKind, others: tuple[FailureKind, ...], order: int
) -> None:
    failures = [Failure(kind, kind) for kind in (cause, *others)][::order]
    assert root_cause(failures).kind == cause


def test_of_equal_failures_the_first_is_the_root_cause() -> None:
    failures = [
        Failure("communication", "x"),
        Failure("worker", "a", 0),
        Failure("worker", "b", 1),
    ]
    assert root_cause(failures).rank == 0


def test_the_history_counts_failures_and_halvings_and_remembers_the_last_faulty_step() -> None:
    history = FailureHistory().with_failure(LOST, 5)
    assert history == FailureHistory((5,), 0, None)
    history = history.with_failure(Failure("fault", "once"), 6)
    assert history == FailureHistory((5, 6), 0, 6)
    history = history.with_failure(Failure("memory", "ran out"), 9)
    assert history == FailureHistory((5, 6, 9), 1, 6)
    history = history.with_failure(Failure("fault", "once"), 0)
    assert history == FailureHistory((5, 6, 9, 9), 1, 0), "step 0 is a step"


# The window of progress


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
def test_a_failure_counts_until_the_run_is_a_hundred_steps_past_it(steps: list[int]) -> None:
    """Against a count from scratch: of all failures, those less than the window behind."""
    history = FailureHistory()
    for step in steps:
        history = history.with_failure(LOST, step)
    furthest = [max(steps[: number + 1]) for number in range(len(steps))]
    assert history.failures == sum(furthest[-1] - reached < PROGRESS_WINDOW for reached in furthest)


@given(st.integers(0, 6), st.integers(0, 10_000), st.lists(st.integers(-50, 0), min_size=8, max_size=8))
def test_a_run_that_makes_no_progress_ends_after_max_failures(
    max_failures: int, step: int, steps_back: list[int]
) -> None:
    """It fails at the same step, or while it repeats the steps before."""
    history = FailureHistory()
    for number, back in enumerate(steps_back, start=1):
        history = history.with_failure(LOST, max(0, step + back * (number > 1)))
        decision = decide_restart(LOST, history, max_failures=max_failures, workers=2, slots=2)
        assert isinstance(decision, GiveUp) == (number > max_failures)


@given(st.integers(1, 6), st.lists(st.integers(PROGRESS_WINDOW, 500), max_size=50))
def test_failures_that_lie_far_apart_never_end_a_run(max_failures: int, distances: list[int]) -> None:
    history = FailureHistory()
    step = 0
    for distance in distances:
        step += distance
        history = history.with_failure(LOST, step)
        decision = decide_restart(LOST, history, max_failures=max_failures, workers=2, slots=2)
        assert isinstance(decision, Restart)


def test_giving_up_names_the_count_and_the_window() -> None:
    decision = decide(LOST, failures=4)
    assert isinstance(decision, GiveUp)
    assert "failed 4 times within 100 steps of progress, and --max-failures is 3" in decision.reason
