"""Which hosts count as stuck: the frozen and the hung, and never a healthy one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runtime.expert_parallel.stuck import HostHealth, find_stuck, phase_limit_s

LIMIT_S = 10.0
PHASE_FACTORS = {
    "step": 1,
    "rest": 6,
    "join": 60,
    "data": 60,
    "snapshot": 60,
    "evaluate": 60,
    "first step": 60,
    "build": 60,
    "save": 60,
    "compile": 360,
}


def host(
    host_id: int,
    phase: str = "step",
    waiting: bool = False,
    silent_s: float = 0.1,
    unchanged_s: float = 0.1,
    **longest: float,
) -> HostHealth:
    return HostHealth(host_id, phase, waiting, silent_s, unchanged_s, **longest)


def waiting_peer(unchanged_s: float) -> HostHealth:
    return host(9, waiting=True, unchanged_s=unchanged_s)


def stuck_ids(*hosts: HostHealth, waited_for: bool = False) -> list[int]:
    return [stuck.host_id for stuck in find_stuck(hosts, LIMIT_S, waited_for)]


def test_hosts_that_make_progress_are_not_stuck() -> None:
    assert stuck_ids() == []
    assert stuck_ids(host(0), host(1, waiting=True)) == []
    assert stuck_ids(host(0, silent_s=9.0), host(1, unchanged_s=10.0), waiting_peer(10.0)) == []


def test_a_frozen_host_is_found_by_its_silence_within_the_limit() -> None:
    assert stuck_ids(waiting_peer(9.6), host(1, silent_s=9.6, unchanged_s=9.6)) == [1]
    frozen_while_waiting = host(1, waiting=True, silent_s=9.6, unchanged_s=9.6)
    assert stuck_ids(waiting_peer(9.6), frozen_while_waiting) == [1]


def test_a_host_without_progress_is_stuck_once_a_peer_has_waited_for_half_the_limit() -> None:
    hung = host(1, unchanged_s=10.1)
    assert stuck_ids(waiting_peer(10.0), hung) == [1]
    assert stuck_ids(waiting_peer(5.1), hung) == [1]
    assert stuck_ids(waiting_peer(4.9), hung) == [], "the peer waits for a moment: perhaps for another"


def test_hosts_that_are_slow_together_are_not_stuck() -> None:
    """No one waits, so no one is harmed; for ever is too long all the same."""
    assert stuck_ids(host(0, unchanged_s=59.0), host(1, unchanged_s=55.0)) == []
    assert stuck_ids(host(0, unchanged_s=60.1), host(1, unchanged_s=55.0)) == [0]
    assert stuck_ids(host(0, unchanged_s=59.0)) == [], "a host alone is waited for by no one"


def test_a_member_that_does_not_leave_is_waited_for_by_those_that_have() -> None:
    assert stuck_ids(host(0, unchanged_s=10.1), waited_for=True) == [0]
    assert stuck_ids(host(0, "data", unchanged_s=599.0), waited_for=True) == []


def test_a_waiting_host_is_not_stuck_while_another_one_works() -> None:
    waiting = [host(host_id, waiting=True, unchanged_s=1000.0) for host_id in (0, 1)]
    assert stuck_ids(*waiting, host(2, unchanged_s=9.0)) == []


def test_hosts_that_all_wait_for_each_other_are_stuck() -> None:
    waiting = [host(host_id, waiting=True, unchanged_s=10.5) for host_id in (0, 1, 2)]
    assert stuck_ids(*waiting) == [0, 1, 2]
    just_began = host(2, waiting=True, unchanged_s=9.0)
    assert stuck_ids(*waiting[:2], just_began) == []
    assert stuck_ids(host(0, waiting=True, unchanged_s=11.0)) == [0]


def test_hosts_that_have_waited_as_long_before_are_not_deadlocked() -> None:
    """A collective of large tensors over a slow network, for example."""
    waiting = [host(host_id, waiting=True, unchanged_s=30.0, longest_wait_s=12.0) for host_id in (0, 1)]
    assert stuck_ids(*waiting) == []
    assert stuck_ids(host(0, unchanged_s=10.1, longest_wait_s=100.0), waiting_peer(10.0)) == [0]


def test_a_resting_host_may_stay_unchanged_but_not_silent() -> None:
    assert stuck_ids(host(0, "rest", unchanged_s=5000.0)) == []
    assert stuck_ids(host(0, "rest", silent_s=10.5, unchanged_s=500.0)) == [0]
    assert stuck_ids(host(0, "rest", unchanged_s=61.0), waiting_peer(60.0)) == [0], "it does not go on"


@pytest.mark.parametrize("phase", PHASE_FACTORS)
def test_phases_of_unknown_length_have_longer_limits(phase: str) -> None:
    limit = LIMIT_S * PHASE_FACTORS[phase]
    assert phase_limit_s(phase, LIMIT_S) == limit
    assert stuck_ids(host(0, phase, unchanged_s=limit), waiting_peer(limit)) == []
    assert stuck_ids(host(0, phase, unchanged_s=limit + 0.1), waiting_peer(limit)) == [0]


@pytest.mark.parametrize("phase", [phase for phase in PHASE_FACTORS if phase != "join"])
def test_in_no_phase_may_a_host_be_silent_for_long(phase: str) -> None:
    """Heartbeats come from a thread of their own. Imports and first calls may hold the lock."""
    silence = LIMIT_S if phase in ("step", "rest") else 3 * LIMIT_S
    shorter = 0.9 * silence
    assert stuck_ids(host(0, phase, silent_s=shorter, unchanged_s=shorter), waiting_peer(4.0)) == []
    assert stuck_ids(host(0, phase, silent_s=silence, unchanged_s=silence), waiting_peer(4.0)) == [0]


def test_a_joining_host_may_be_silent_for_its_whole_phase() -> None:
    assert stuck_ids(host(0, "join", silent_s=50.0, unchanged_s=50.0)) == []
    assert stuck_ids(host(0, "join", silent_s=60.0, unchanged_s=60.0)) == [0]


def test_what_was_measured_raises_the_limits() -> None:
    assert phase_limit_s("step", LIMIT_S, longest_s=2.0) == 10.0
    assert phase_limit_s("step", LIMIT_S, longest_s=30.0) == 90.0
    assert stuck_ids(host(0, unchanged_s=89.0, longest_work_s=30.0), waiting_peer(80.0)) == []
    assert stuck_ids(host(0, unchanged_s=90.1, longest_work_s=30.0), waiting_peer(80.0)) == [0]
    assert stuck_ids(host(0, silent_s=14.0, longest_silence_s=5.0)) == []
    assert stuck_ids(host(0, silent_s=15.1, longest_silence_s=5.0)) == [0]


@given(
    steps_s=st.lists(st.floats(0.01, 200.0), min_size=2, max_size=5),
    slowest_s=st.floats(0.1, 200.0),
    now=st.floats(0.0, 1.0),
)
def test_no_host_is_stuck_that_takes_no_longer_than_before(
    steps_s: list[float], slowest_s: float, now: float
) -> None:
    """Whatever the steps take: hosts that compute for at most three times the longest step so far,
    while the others wait for them, are healthy."""
    hosts = [
        host(
            host_id,
            waiting=host_id > 0,
            unchanged_s=now * min(step_s, 3 * slowest_s),
            longest_work_s=slowest_s,
        )
        for host_id, step_s in enumerate(steps_s)
    ]
    assert stuck_ids(*hosts) == []
