"""Calls to all members of a group, on a real Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from harness.hosts.cluster import RayCluster, connected
from harness.hosts.idle_hosts import IdlePool, idle_pool, is_dead, kill_and_wait, wait_until
from orchestrator.runtime.expert_parallel.calls import GroupCalls
from orchestrator.runtime.failures import cause_of
from orchestrator.runtime.recovery import Failure

pytestmark = [pytest.mark.ray]


@pytest.fixture
def pool(shared_cluster: RayCluster) -> Iterator[IdlePool]:
    with connected(shared_cluster), idle_pool() as pool:
        yield pool


def test_calls_return_fail_or_show_that_a_host_is_lost(pool: IdlePool) -> None:
    pool.start(0, 1, 2)
    pool.join(0, 2, 0, 1)
    calls = GroupCalls(pool)  # pyrefly: ignore[bad-argument-type]
    calls.set_members((2, 0, 1))
    actions = {2: ("go on", 5), 0: ("fail", 0), 1: ("wait", 0)}
    calls.call_all(lambda actor, host_id, rank: actor.run_segment.remote(actions[host_id]))
    ray.wait(list(calls.pending), num_returns=2)
    calls.collect()
    assert (calls.main_result, calls.rank(1), calls.has_failed) == (5, 2, True)
    assert isinstance(calls.errors[0], ValueError)
    assert (list(calls.pending.values()), calls.lost) == ([1], {})
    kill_and_wait(pool.actor(1))
    ray.wait(list(calls.pending))
    calls.collect()
    assert calls.lost == {1: Failure("worker", "host 2 was lost", 2, loss="died")}
    assert not calls.pending


def test_a_dropped_host_is_ended_and_not_waited_for(pool: IdlePool) -> None:
    pool.start(2)
    pool.join(0, 2)
    calls = GroupCalls(pool)  # pyrefly: ignore[bad-argument-type]
    calls.set_members((2,))
    assert not calls.has_failed
    calls.call_all(lambda actor, host_id, rank: actor.run_segment.remote(("wait", 0)))
    actor = pool.actor(2)
    calls.drop(2, "stuck", "was stuck")
    assert calls.pending == {}
    assert calls.lost == {2: Failure("worker", "host 0 was stuck", 0, loss="stuck")}
    wait_until(lambda: is_dead(actor))


def test_rounds_of_calls_end_in_order_and_the_first_error_of_a_host_counts(pool: IdlePool) -> None:
    pool.start(0, 1)
    pool.join(0, 0, 1)
    calls = GroupCalls(pool)  # pyrefly: ignore[bad-argument-type]
    calls.set_members((0, 1))
    for number, action in enumerate(("go on", "fail", "go on")):
        calls.queue_all(lambda actor, host_id, rank, job=(action, number): actor.run_segment.remote(job))
    assert (calls.num_rounds, len(calls.pending)) == (3, 6)
    ray.wait(list(calls.pending), num_returns=6)
    calls.collect()
    assert calls.main_results == [0, None, None], "the third call was granted before the second failed"
    assert [type(cause_of(calls.errors[host_id])) for host_id in (0, 1)] == [ValueError] * 2
    assert calls.round_is_done
    calls.end_round()
    assert (calls.num_rounds, calls.main_result) == (2, None)


def test_a_dropped_host_leaves_every_round(pool: IdlePool) -> None:
    pool.start(0, 1)
    pool.join(0, 0, 1)
    calls = GroupCalls(pool)  # pyrefly: ignore[bad-argument-type]
    calls.set_members((0, 1))
    for _ in range(2):
        calls.queue_all(lambda actor, host_id, rank: actor.run_segment.remote(("wait", 0)))
    calls.drop(1, "stuck", "was stuck")
    assert list(calls.pending.values()) == [0, 0]
