"""The interval between snapshots follows their measured cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runtime.expert_parallel.segments import (
    SnapshotCost,
    SnapshotInterval,
    choose_interval,
)

SECONDS = st.floats(1e-6, 1e5)


@pytest.mark.parametrize(
    ("stall_s", "transfer_s", "step_s", "steps", "reason"),
    [
        (0.2, 1.0, 0.5, 20, "stalls the steps for 200 ms: 2% of the time"),
        (0.201, 1.0, 0.5, 21, "2% of the time"),
        (0.2, 30.0, 0.5, 60, "takes 30 s to reach the driver"),
        (0.001, 0.02, 0.02, 50, "more often than every 1 s"),
        (12.0, 1.0, 2.0, 150, "3.8% of the time, so that no more than 5m 00s are lost"),
        (12.0, 400.0, 2.0, 200, "takes 6m 40s to reach"),
        (0.2, 0.1, 13.0, 1, "steps of 13 s"),
    ],
    ids=["budget", "rounded up", "transfer", "cheap", "expensive", "slow transfer", "long steps"],
)
def test_the_interval_and_its_reason(
    stall_s: float, transfer_s: float, step_s: float, steps: int, reason: str
) -> None:
    choice = choose_interval(SnapshotCost(stall_s, transfer_s), step_s)
    assert choice.value == steps
    assert reason in choice.reason


@given(SECONDS, SECONDS, SECONDS)
def test_an_interval_keeps_the_budget_and_waits_for_the_transfer(
    stall_s: float, transfer_s: float, step_s: float
) -> None:
    steps = choose_interval(SnapshotCost(stall_s, transfer_s), step_s).value
    between_s = steps * step_s * (1 + 1e-9)
    assert steps >= 1
    assert between_s >= transfer_s
    assert between_s >= min(stall_s / 0.02, 300.0)
    assert (steps - 1) * step_s <= max(transfer_s, min(stall_s / 0.02, 300.0), 1.0), "no longer than needed"


def test_an_interval_is_measured_from_the_second_segment_on() -> None:
    """The first segment of a group has the first step, which may compile."""
    interval = SnapshotInterval("auto")
    assert (interval.current.value, "no snapshot" in interval.current.reason) == (5, True)
    cost = SnapshotCost(0.1, 0.5)
    assert interval.segment_done(5, 100.0, [cost]) is None, "the time of a step is not known yet"
    chosen = interval.segment_done(25, 2.0, [])
    assert chosen is not None
    assert chosen.value == math.ceil(0.1 / (0.02 * 0.1))
    assert interval.current == chosen
    interval.begin_group()
    assert interval.segment_done(26, 900.0, [cost]) is None, "the first step may compile"
    assert interval.segment_done(46, 2.0, [cost]) is None


def test_one_slow_snapshot_and_small_changes_leave_the_interval() -> None:
    interval = SnapshotInterval("auto")
    interval.segment_done(0, 0.0, [SnapshotCost(0.1, 0.1)] * 3)
    first = interval.segment_done(20, 2.0, [])
    assert first is not None
    assert interval.segment_done(40, 2.0, [SnapshotCost(30.0, 0.1)]) is None
    assert interval.segment_done(60, 2.2, [SnapshotCost(0.1, 0.1)]) is None
    assert interval.current == first
    slower = interval.segment_done(80, 2.0, [SnapshotCost(0.3, 0.1)] * 3)
    assert slower is not None
    assert slower.value > 2 * first.value


def test_an_interval_that_is_set_stays() -> None:
    for requested in (0, 7):
        interval = SnapshotInterval(requested)
        interval.segment_done(0, 0.0, [SnapshotCost(9.0, 9.0)] * 5)
        assert interval.segment_done(10, 1.0, []) is None
        assert interval.current.value == requested
        assert f"--snapshot-every {requested}" in interval.current.reason
