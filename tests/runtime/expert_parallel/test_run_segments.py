"""The driver of a run on expert hosts, without Ray: growth, segments granted ahead, and snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from harness.fakes.fake_hosts import FakeRun, MakeRun, fake_runs
from orchestrator.errors import UserError
from orchestrator.runtime.expert_parallel.host_worker import Segment, SegmentResult
from orchestrator.runtime.expert_parallel.segments import MAX_GRANTED, SnapshotCost
from orchestrator.runtime.expert_parallel.states import (
    Closing,
    Joining,
    Running,
)
from orchestrator.train.checkpoint.snapshot_source import ExpertsMissing, SnapshotsUnusable
from orchestrator.types import Choice, Rejected

CONNECTION_CLOSED = RuntimeError("gloo/ connection closed by peer")


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    return fake_runs(tmp_path, monkeypatch)


# Growth


def run_that_can_grow(make_run: MakeRun) -> FakeRun:
    """Return a run on two of three hosts, with complete snapshots; the third host is ready again."""
    run = make_run()
    run.run._state = Running(0, (0, 1), snapshot_at_end=True)
    run.pool.reserve(0.0)
    run.run._group.calls.set_members((0, 1))
    run.run._proven_hosts = (0, 1)
    run.run._has_trained = True
    run.run._grant_segments(snapshot_at_end=True)
    run.snapshots.step = 5
    return run


def test_more_hosts_join_at_the_end_of_a_segment(make_run: MakeRun) -> None:
    run = run_that_can_grow(make_run)
    run.finish("run_segment", (None, 5))
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1, 2)


def test_no_host_joins_if_a_snapshot_is_lost(make_run: MakeRun) -> None:
    run = run_that_can_grow(make_run)
    run.snapshots.is_readable = False
    run.finish("run_segment", (None, 5))
    assert run.state == Running(0, (0, 1), run.state.history), "the group goes on as before"


def test_a_newcomer_that_cannot_join_is_excluded_and_the_others_go_on(make_run: MakeRun) -> None:
    run = run_that_can_grow(make_run)
    run.finish("run_segment", (None, 5))
    run.finish("join", UserError("does not see the run folder"), 2)
    run.finish("join", CONNECTION_CLOSED, 0, 1)
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1)
    assert run.pool.excluded == {2}
    assert 2 not in run.pool.actors, "it is not started again"
    assert not run.snapshots.cleared


def test_a_newcomer_that_was_given_too_few_snapshots_is_fit_and_they_are_good(make_run: MakeRun) -> None:
    """All join again, with all snapshots."""
    run = run_that_can_grow(make_run)
    run.finish("run_segment", (None, 5))
    run.finish("join", ExpertsMissing("no snapshot has expert 3"), 2)
    run.finish("join", CONNECTION_CLOSED, 0, 1)
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1, 2)
    assert run.pool.excluded == set()
    assert not run.snapshots.cleared


@pytest.mark.parametrize(
    ("error", "cleared"),
    [
        (SnapshotsUnusable("the snapshots cannot be restored: ValueError"), True),
        (ValueError("3 hosts cannot be divided"), False),
    ],
)
def test_only_snapshots_that_cannot_be_restored_are_dropped(
    make_run: MakeRun, error: Exception, cleared: bool
) -> None:
    run = run_that_can_grow(make_run)
    run.finish("run_segment", (None, 5))
    run.finish("join", error, 0)
    run.finish("join", CONNECTION_CLOSED, 1, 2)
    assert isinstance(run.state, Joining)
    assert run.snapshots.cleared == cleared


# Segments ahead


def granted_segments(run: FakeRun, host_id: int = 0) -> list[Segment]:
    """Return the segments that a host was granted and has not finished."""
    calls = run.pool.actor(host_id).calls
    return [call.arguments[0] for call in calls if call.name == "run_segment" and not call.done]


def test_hosts_have_two_segments_ahead_of_the_one_they_run(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    for step in (2, 4, 6):
        assert [len(granted_segments(run, host_id)) for host_id in range(3)] == [MAX_GRANTED] * 3
        run.finish("run_segment", (None, step, 1.0))
    assert isinstance(run.state, Running)


def test_a_driver_that_was_away_hands_out_the_segments_it_owes(make_run: MakeRun) -> None:
    """All granted segments have ended before it looks: their own times count, not its clock."""
    run = make_run()
    run.begin_first_segment()
    for host_id in range(3):
        for step in (2, 4, 6):
            run.pool.actor(host_id).finish("run_segment", SegmentResult(None, step, 5.0))
    for _ in range(3):
        run.poll()
    assert [segment.steps for segment in granted_segments(run)] == [2, 2, 2]


def test_a_group_grows_only_after_all_granted_segments(make_run: MakeRun) -> None:
    run = make_run()
    run.pool.reserve(0.0)
    run.run._state = Running(0, (0, 1))
    run.run._group.calls.set_members((0, 1))
    run.run._grant_segments(snapshot_at_end=False)
    run.finish("run_segment", (None, 2, 1.0))
    assert [segment.snapshot_at_end for segment in granted_segments(run)] == [False, False, True]
    run.snapshots.step = 8
    for step in (4, 6):
        run.finish("run_segment", (None, step, 1.0))
        assert isinstance(run.state, Running), "the hosts have segments that were granted before"
        assert granted_segments(run)[-1].snapshot_at_end, "and no more beyond"
    run.finish("run_segment", (None, 8, 1.0))
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1, 2)


def test_segments_are_granted_one_by_one_until_lost_steps_are_repeated(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    run.finish("run_segment", RayActorError(), 1)
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    run.poll()
    run.finish("join")
    assert [segment.steps for segment in granted_segments(run)] == [1]
    run.finish("run_segment", (None, 3, 1.0))
    assert [segment.steps for segment in granted_segments(run)] == [4], "steps 4 to 7 were lost"
    run.finish("run_segment", (None, 7, 1.0))
    assert len(granted_segments(run)) == MAX_GRANTED
    assert len(run.events("recovery")) == 1


def test_the_end_counts_though_a_host_dies_before_the_driver_looks(make_run: MakeRun) -> None:
    """The main host reports the end in a later segment than the one the driver waits for."""
    run = make_run()
    run.begin_first_segment()
    for host_id in (0, 1):
        run.pool.actor(host_id).finish("run_segment", SegmentResult(None, 2))
        run.pool.actor(host_id).finish("run_segment", SegmentResult("completed", 3))
    run.finish("run_segment", RayActorError(), 2)
    assert isinstance(run.state, Closing)
    assert run.events("failure") == []


# Snapshots


def finish_segment(run: FakeRun, step: int, seconds: float, *costs: SnapshotCost) -> list[int]:
    """End the segment at a step, after some seconds. Return the next interval of each host."""
    run.snapshots.costs = list(costs)
    run.finish("run_segment", (None, step, seconds))
    return [granted_segments(run, host_id)[-1].snapshot_every for host_id in run.state.members]


def test_all_hosts_get_the_interval_that_was_measured(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    assert finish_segment(run, 5, 60.0, SnapshotCost(0.1, 0.5)) == [5] * 3, "the first step may compile"
    assert run.events("snapshot_interval") == []
    assert finish_segment(run, 25, 2.0) == [50] * 3
    (event,) = run.events("snapshot_interval")
    assert (event["step"], event["every"]) == (25, 50)
    assert "2% of the time" in event["reason"]
    assert finish_segment(run, 45, 2.1) == [50] * 3


def test_an_interval_that_is_set_is_kept(make_run: MakeRun) -> None:
    run = make_run(snapshot_every=7)
    run.begin_first_segment()
    finish_segment(run, 5, 2.0, SnapshotCost(9.0, 9.0))
    assert finish_segment(run, 10, 2.0, SnapshotCost(9.0, 9.0)) == [7] * 3
    assert run.events("snapshot_interval") == []


def test_snapshots_without_memory_are_off_with_a_warning(make_run: MakeRun) -> None:
    run = make_run(snapshots=Choice("off", "the reason", (Rejected("on", "not enough memory"),)))
    run.begin_first_segment()
    finish_segment(run, 5, 2.0, SnapshotCost(0.1, 0.1))
    assert finish_segment(run, 10, 2.0, SnapshotCost(0.1, 0.1)) == [0] * 3
    assert not run.run._limits.can_grow
    (warning,) = run.events("warning")
    assert warning["message"] == "snapshots are off: not enough memory; the reason"


def test_snapshots_without_memory_for_backups_have_none(make_run: MakeRun) -> None:
    assert make_run().snapshots.backups
    reduced = make_run(snapshots=Choice("without backups", "the reason", (Rejected("on", "not enough"),)))
    assert not reduced.snapshots.backups
    assert reduced.run._limits.can_grow
