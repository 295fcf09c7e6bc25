"""The lower bound of a placement, and hosts whose experts exceed their memory."""

from __future__ import annotations

import pytest

from experts.placement.problem import CLOSE, PROVEN, PlacementProblem, first_overfull_host, lower_bound


@pytest.mark.parametrize(
    ("work", "speed", "bound"),
    [
        ([4, 4, 4], [1, 1], 6.0),  # all work over all hosts
        ([10, 1, 1], [1, 1], 10.0),  # the heaviest expert
        ([1, 10, 1], [1, 4], 2.5),  # the same on the fastest host
        ([8, 8], [1, 2, 5], 16 / 7),  # the two heaviest on the two fastest hosts
        ([9, 1], [2, 1, 100], 10 / 102),
    ],
)
def test_the_bound_is_the_work_of_all_or_of_the_heaviest(
    work: list[float], speed: list[float], bound: float
) -> None:
    assert lower_bound(work, speed) == pytest.approx(bound)


def test_a_host_may_be_filled_to_the_last_byte() -> None:
    problem = PlacementProblem([1, 1, 1], [3, 4, 5], [1, 1], [8, 5], 1.5)
    assert first_overfull_host([0, 1, 0], problem) is None
    assert first_overfull_host([0, 0, 1], problem) is None
    assert first_overfull_host([1, 1, 0], problem) == (1, 7)
    assert first_overfull_host([0, 0, 0], problem) == (0, 12)


def test_limits_lie_just_above_the_bound() -> None:
    """A result below them is taken for the best; below one they would end no search."""
    assert 1 < PROVEN < 1 + 1e-6 < CLOSE < 1.001
