"""Newcomers that cannot join a group: the run goes on without them, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from harness.fakes.fake_hosts import FakeRun, MakeRun, fake_runs
from orchestrator.errors import OutOfMemory, UserError
from orchestrator.runtime.expert_parallel.states import Ended, Joining, Running, WaitingForHosts
from orchestrator.runtime.expert_parallel.stuck import HostHealth

CONNECTION_CLOSED = RuntimeError("gloo/ connection closed by peer")
DIED = RayActorError()


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    return fake_runs(tmp_path, monkeypatch)


def lose_host_1(run: FakeRun) -> None:
    """Lose host 1 in a segment. A new process is ready to take its place, and joins with the others."""
    run.begin_first_segment()
    run.snapshots.step = 5
    run.finish("run_segment", DIED, 1)
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    run.poll()
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1, 2)


def lose_all(run: FakeRun) -> None:
    """Lose all hosts in a segment. New ones join."""
    run.begin_first_segment()
    run.finish("run_segment", DIED)
    while not isinstance(run.state, Joining):
        run.poll()


def fail_to_join(run: FakeRun, error: Exception) -> None:
    """Host 1 fails while it joins, and the others lose contact with it."""
    run.finish("join", error, 1)
    run.finish("join", CONNECTION_CLOSED, 0, 2)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module named the_task"),
        UserError("does not see the run folder"),
        OutOfMemory("host 1 ran out of memory", 8),
        RuntimeError("CUDA error: invalid device ordinal"),
    ],
    ids=["import", "folder", "memory", "device"],
)
def test_a_newcomer_with_an_error_of_its_own_is_left_out(make_run: MakeRun, error: Exception) -> None:
    run = make_run(max_failures=1)
    lose_host_1(run)
    fail_to_join(run, error)
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 2)
    assert run.pool.excluded == {1}
    assert not run.snapshots.cleared
    request = run.pool.actor(0).last_call("join").arguments[3]
    assert request.halvings == 0, "smaller micro-batches would not help"
    lost, unfit = run.events("failure")
    assert lost["message"].startswith("host 1 was lost")
    assert unfit["message"].startswith("host 1 could not join: ")
    assert "continuing on 2 of 3 hosts" in unfit["message"]
    run.finish("join")
    assert isinstance(run.state, Running)


def test_a_newcomer_that_dies_while_it_joins_is_started_again_and_costs_no_failure(make_run: MakeRun) -> None:
    """Two losses in one recovery, with --max-failures 1: the second newcomer joins."""
    run = make_run(max_failures=1)
    lose_host_1(run)
    fail_to_join(run, DIED)
    assert isinstance(run.state, WaitingForHosts)
    assert run.pool.failed_joins == [1]
    assert run.events("failure")[1]["message"].startswith("host 1 could not join: was lost")
    run.poll()
    assert isinstance(run.state, Joining)
    run.finish("join")
    assert isinstance(run.state, Running)
    assert run.state.history.failures == 1
    assert run.pool.failed_joins == [], "they are counted in a row"


def test_a_newcomer_that_is_stuck_while_it_joins_may_try_again(make_run: MakeRun) -> None:
    run = make_run(max_failures=1, collective_timeout=10)
    lose_host_1(run)
    run.heartbeats.hosts = [
        HostHealth(host_id, "first step", host_id != 1, 1e4 * (host_id == 1), 1e4) for host_id in range(3)
    ]
    run.poll()
    run.finish("join", CONNECTION_CLOSED, 0, 2)
    assert run.pool.failed_joins == [1]
    assert not isinstance(run.state, Ended)


@pytest.mark.parametrize("error", [UserError("no such data"), OutOfMemory("ran out", 8)])
def test_another_newcomer_goes_on_where_all_proven_hosts_are_lost(make_run: MakeRun, error: Any) -> None:
    run = make_run(hosts=2)
    lose_all(run)
    run.finish("join", error, 0)
    run.finish("join", CONNECTION_CLOSED, 1)
    assert isinstance(run.state, Joining)
    assert run.state.members == (1,)


def test_an_error_that_all_newcomers_have_ends_the_run(make_run: MakeRun) -> None:
    run = make_run(hosts=2)
    lose_all(run)
    run.finish("join", UserError("no such data"))
    run.poll()
    assert isinstance(run.state, Ended)
    assert "no such data" in str(run.state.given_up)


def test_no_newcomer_is_left_out_for_what_the_proven_hosts_have_too(make_run: MakeRun) -> None:
    """All run out of memory: smaller micro-batches help, and fewer hosts would not."""
    run = make_run()
    lose_host_1(run)
    run.finish("join", OutOfMemory("ran out", 8))
    while not isinstance(run.state, Joining):
        run.poll()
    assert run.pool.excluded == set()
    assert run.state.members == (0, 1, 2)
    assert run.pool.actor(0).last_call("join").arguments[3].halvings == 1
