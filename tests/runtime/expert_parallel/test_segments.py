"""The lengths of the segments in which expert hosts train."""

from __future__ import annotations

import pytest

from orchestrator.runtime.expert_parallel.segments import SegmentLengths


def test_segments_approach_two_seconds() -> None:
    lengths = SegmentLengths()
    assert lengths.next_length(100.0, 0) == 5
    assert lengths.next_length(101.0, 0) == 10, "five steps took one second"
    assert lengths.next_length(105.0, 0) == 5, "ten steps took four seconds"


def test_a_segment_grows_fourfold_at_most_and_has_one_step_at_least() -> None:
    lengths = SegmentLengths()
    lengths.next_length(100.0, 0)
    assert lengths.next_length(100.0, 0) == 20
    assert lengths.next_length(1000.0, 0) == 1


def test_the_time_between_groups_is_not_that_of_a_segment() -> None:
    lengths = SegmentLengths()
    assert not lengths.begun
    lengths.next_length(100.0, 0)
    assert lengths.begun
    lengths.begin_group()
    assert not lengths.begun
    assert lengths.next_length(500.0, 0) == 5, "the length of the last group"


@pytest.mark.parametrize("steps_to_replay", [1, 12])
def test_after_a_failure_one_step_comes_first_and_then_the_other_lost_steps(steps_to_replay: int) -> None:
    lengths = SegmentLengths()
    lengths.next_length(100.0, 0)
    lengths.next_length(101.0, 0)
    lengths.begin_group()
    assert lengths.next_length(110.0, steps_to_replay) == 1
    assert lengths.next_length(110.5, steps_to_replay) == steps_to_replay
    assert lengths.next_length(112.5, 0) == 10, "the length before the failure, for two seconds of steps"
