"""Shares of copies against linear programming, and the bookkeeping of moves and copies."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from experts.placement.division import (
    Division,
    SearchBudget,
    Shares,
    copy_seconds,
    host_seconds,
    imbalance,
    resplit,
    water_level,
)
from experts.placement.problem import Problem


def problem_of(work: list[float], speed: list[float]) -> Problem:
    size, sync, update = ((each,) * len(work) for each in (100.0, 1.0, 0.5))
    return Problem(work, size, speed, [1000.0] * len(speed), sync, update)


def even(*hosts: int) -> tuple[tuple[int, float], ...]:
    return tuple((host, 1 / len(hosts)) for host in hosts)


def fastest(problem: Problem, shares: Shares) -> float:
    """The least time of the slowest host, by linear programming over all shares."""
    cells = [(expert, host) for expert, copies in enumerate(shares) for host, _ in copies]
    # The variables are the shares and, last, the time of the slowest host.
    loads = np.zeros((len(problem.speed), len(cells) + 1))
    sums = np.zeros((len(shares), len(cells) + 1))
    for index, (expert, host) in enumerate(cells):
        loads[host, index] = problem.work[expert] / problem.speed[host]
        sums[expert, index] = 1
    loads[:, -1] = -1
    cost = np.eye(len(cells) + 1)[-1]
    ones = np.ones(len(shares))
    return float(linprog(cost, loads, np.zeros(len(problem.speed)), sums, ones).fun)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_the_shares_make_the_slowest_host_as_fast_as_any_shares_do(seed: int) -> None:
    draw = random.Random(seed)
    num_hosts = draw.randint(1, 6)
    num_experts = draw.randint(1, 8)
    work = [draw.choice([0.0, 1.0, draw.paretovariate(0.8)]) for _ in range(num_experts)]
    problem = problem_of(work, [draw.choice([1.0, 2.0, 3.5]) for _ in range(num_hosts)])
    hosts = [draw.sample(range(num_hosts), draw.randint(1, num_hosts)) for _ in range(num_experts)]
    shares = tuple(even(*sorted(each)) for each in hosts)
    divided = resplit([problem], shares, SearchBudget())
    assert [sum(share for _, share in copies) for copies in divided] == pytest.approx([1] * num_experts)
    assert all(share >= 0 for copies in divided for _, share in copies)
    slowest = max(host_seconds(problem, divided))
    assert slowest <= fastest(problem, shares) * 1.005 + 1e-9


def test_one_division_suits_two_loads() -> None:
    # Each expert is hot in one load. Under the mean of both, any shares would do.
    loads = [problem_of([9.0, 1.0], [1.0, 1.0]), problem_of([1.0, 9.0], [1.0, 1.0])]
    divided = resplit(loads, (((0, 1.0), (1, 0.0)), ((0, 0.0), (1, 1.0))), SearchBudget())
    assert [imbalance(problem, divided) for problem in loads] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_two_loads_weigh_by_the_work_of_the_copied_expert() -> None:
    # The expert that stays on host 0 is busy in the first load only.
    loads = [problem_of([6.0, 4.0], [1.0, 1.0]), problem_of([6.0, 0.0], [1.0, 1.0])]
    divided = resplit(loads, (even(0, 1), even(0)), SearchBudget())
    share = dict(divided[0])[0]
    # Between 1/6, which suits the first, and 1/2, which suits the second.
    assert share == pytest.approx((1 / 6 + 1 / 2) / 2, abs=1e-3)


def test_moves_and_copies_are_counted() -> None:
    problem = problem_of([4.0, 2.0], [1.0, 2.0])
    division = Division([problem], (even(0), even(0)), SearchBudget())
    division.move(0, 0, 1)
    assert division.seconds_LH.tolist() == [[2.0, 2.0]]
    assert (division.free_H.tolist(), division.bytes_moved) == ([900.0, 900.0], 100.0)
    division.copy(0, 0)
    division.settle()
    assert division.bytes_moved == 100.0  # it was there at first
    assert division.free_H.tolist() == [800.0, 900.0]
    assert division.alone_E.tolist() == [-1, 0]
    assert host_seconds(problem, division.shares) == pytest.approx([2.0, 2.0])


def test_a_copy_moves_with_its_share() -> None:
    problem = problem_of([6.0, 2.0], [1.0, 1.0, 1.0])
    division = Division([problem], (((0, 0.25), (1, 0.75)), even(0)), SearchBudget())
    division.move(0, 1, 2)
    assert division.shares[0] == ((0, 0.25), (2, 0.75))
    assert division.free_H.tolist() == [800.0, 1000.0, 900.0]
    experts, hosts, shares = (column.tolist() for column in division.all_copies())
    assert sorted(zip(experts, hosts, shares, strict=True)) == [(0, 0, 0.25), (0, 2, 0.75), (1, 0, 1.0)]


@pytest.mark.parametrize("seed", range(20))
def test_a_division_after_changes_is_that_of_its_shares_and_its_clone_is_not_changed(seed: int) -> None:
    draw = random.Random(seed)
    problem = problem_of([float(draw.randint(0, 9)) for _ in range(7)], [1.0, 2.0, 0.5, 1.5])
    division = Division([problem], tuple(even(draw.randrange(4)) for _ in range(7)), SearchBudget())
    clone = division.clone()
    before = clone.shares
    for _ in range(12):
        expert = draw.randrange(7)
        hosts = list(division.copies[expert])
        others = [host for host in range(4) if host not in hosts]
        if others and draw.random() < 0.6:
            division.move(expert, draw.choice(hosts), draw.choice(others))
        elif others:
            division.copy(expert, draw.choice(others))
            division.adjust(1, frozenset(hosts))
        fresh = Division([problem], division.shares, SearchBudget())
        assert division.seconds_LH == pytest.approx(fresh.seconds_LH)
        assert division.free_H.tolist() == fresh.free_H.tolist()
        assert division.alone_E.tolist() == fresh.alone_E.tolist()
    assert clone.shares == before
    assert clone.seconds_LH.tolist() == Division([problem], before, SearchBudget()).seconds_LH.tolist()


def test_the_busiest_host_decides_how_long_copies_are_summed_and_updated() -> None:
    problem = problem_of([1.0] * 3, [1.0] * 3)
    assert copy_seconds(problem, (even(0), even(1), even(2))) == 0
    # Two copies pass a gradient once each way in halves, three copies in thirds.
    assert copy_seconds(problem, (even(0, 1), even(0, 1, 2), even(2))) == pytest.approx(1 + 4 / 3 + 2 * 0.5)


def test_water_fills_the_lowest_hosts_first() -> None:
    assert water_level(2.0, [(0.0, 1.0), (5.0, 1.0)]) == 2.0
    assert water_level(7.0, [(0.0, 1.0), (5.0, 1.0)]) == 6.0
    assert water_level(3.0, [(0.0, 1.0), (0.0, 2.0)]) == 1.0
