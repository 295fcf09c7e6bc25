"""The lower bound of a placement, and hosts whose experts exceed their memory."""

from __future__ import annotations

import random

import pytest

from experts.placement.problem import CLOSE, PROVEN, Problem, first_overfull_host, lower_bound
from harness.moe.placement_oracle import experts_of_work, hosts_of_speed, optimum


@pytest.mark.parametrize(
    ("work", "speed", "bound"),
    [
        ([4, 4, 3, 1], [1, 1], 6.0),  # all work over all hosts
        ([4, 4, 4], [1, 1], 8.0),  # three alike on two hosts
        ([5, 4, 4, 4, 4], [1, 2, 3], 4.0),  # five as light as the lightest
        ([10, 1, 1], [1, 1], 10.0),  # the heaviest expert
        ([1, 10, 1], [1, 4], 2.5),  # the same on the fastest host
        ([8, 8, 1], [4, 4, 8], 16 / 12),  # the two heaviest on the two fastest hosts
        ([8, 8], [1, 2, 5], 16 / 5),  # both on the fastest host
        ([9, 1], [2, 1, 100], 10 / 102),
    ],
)
def test_the_bound_is_the_work_of_all_of_the_heaviest_or_of_as_many_alike(
    work: list[float], speed: list[float], bound: float
) -> None:
    assert lower_bound(work, speed) == pytest.approx(bound)


def test_a_host_may_be_filled_to_the_last_byte() -> None:
    problem = Problem([1, 1, 1], [3, 4, 5], [1, 1], [8, 5])
    assert first_overfull_host([0, 1, 0], problem) is None
    assert first_overfull_host([0, 0, 1], problem) is None
    assert first_overfull_host([1, 1, 0], problem) == (1, 7)
    assert first_overfull_host([0, 0, 0], problem) == (0, 12)


def test_limits_lie_just_above_the_bound() -> None:
    """A result below them is taken for the best; below one they would end no search."""
    assert 1 < PROVEN < 1 + 1e-6 < CLOSE < 1.001


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_is_faster_than_the_bound_and_of_equal_experts_the_best_reaches_it(seed: int) -> None:
    draw = random.Random(seed)
    work = [float(draw.choice([1, 2, 3, 5])) for _ in range(draw.randint(1, 6))]
    hosts = hosts_of_speed(*[draw.choice([1, 1.5, 2, 4]) for _ in range(draw.randint(1, 4))])
    speed = [host.speed for host in hosts]
    assert lower_bound(work, speed) <= optimum(experts_of_work(*work), hosts)
    alike = [work[0]] * len(work)
    assert lower_bound(alike, speed) == optimum(experts_of_work(*alike), hosts)
