"""The lengths of the segments in which expert hosts train."""

from __future__ import annotations

import pytest

from orchestrator.runtime.expert_parallel.segments import MAX_GRANTED, SegmentLengths


def lengths_of_a_running_group(steps: int, seconds: float) -> SegmentLengths:
    """Return the lengths after a segment of so many steps."""
    lengths = SegmentLengths()
    lengths._steps = steps
    lengths.grant(0)
    lengths.finish(seconds)
    return lengths


def test_segments_approach_five_seconds() -> None:
    lengths = SegmentLengths()
    assert lengths.grant(0) == 2
    lengths.finish(1.25)
    assert lengths.grant(0) == 8, "two steps took 1.25 seconds"
    lengths.finish(10.0)
    assert lengths.grant(0) == 4, "eight steps took ten seconds"


def test_each_granted_segment_is_measured_by_its_own_length() -> None:
    """The driver may hear of several segments at once, long after they have ended."""
    lengths = lengths_of_a_running_group(10, 1.0)
    granted = [lengths.grant(0) for _ in range(MAX_GRANTED)]
    assert granted == [40, 40, 40]
    lengths.finish(4.0)
    assert lengths.grant(0) == 50, "forty steps took four seconds"
    lengths.finish(8.0)
    assert lengths.grant(0) == 25, "forty steps took eight seconds"
    lengths.finish(4.0)
    lengths.finish(2.5)
    assert lengths.grant(0) == 100, "fifty steps took 2.5 seconds"


def test_a_segment_grows_fourfold_at_most_and_has_one_step_at_least() -> None:
    assert lengths_of_a_running_group(10, 0.0).grant(0) == 40
    assert lengths_of_a_running_group(10, 1000.0).grant(0) == 1
    assert lengths_of_a_running_group(1, 0.0).grant(0) == 8, "from one step as from the first two"


def test_a_new_group_begins_with_the_length_of_the_last_one() -> None:
    lengths = SegmentLengths()
    assert not lengths.begun
    lengths.grant(0)
    lengths.finish(2.5)
    lengths.grant(0)
    assert lengths.begun
    lengths.begin_group()
    assert not lengths.begun
    assert lengths.grant(0) == 4
    lengths.finish(5.0)
    assert lengths.grant(0) == 4, "the segment that the last group did not finish counts for nothing"


@pytest.mark.parametrize("steps_to_replay", [1, 12])
def test_after_a_failure_one_step_comes_first_and_then_the_other_lost_steps(steps_to_replay: int) -> None:
    lengths = lengths_of_a_running_group(10, 1.0)
    lengths.begin_group()
    assert lengths.grant(steps_to_replay) == 1
    lengths.finish(0.1)
    assert lengths.grant(steps_to_replay) == steps_to_replay
