"""The heuristic and the branch and bound, each by itself, against enumeration."""

from __future__ import annotations

import math
import random

import pytest

from experts.placement import placement
from experts.placement.placement import ExpertCost, HostFacts
from experts.placement.problem import PlacementProblem
from experts.placement.search import BranchAndBound, _best_swap, _SearchState, heuristic
from harness.moe.placement_oracle import (
    experts_of_work,
    hosts_of_speed,
    optimum,
    random_case,
    slowest_time,
)


@pytest.mark.parametrize("seed", range(150))
def test_branch_and_bound_equals_enumeration(seed: int) -> None:
    """Few different experts and hosts, so that many are alike, and memory that is often just
    enough."""
    draw = random.Random(seed)
    num_experts = draw.randint(1, 7)
    experts = [ExpertCost(draw.choice([0, 2, 3, 3, 5]), draw.choice([1, 2])) for _ in range(num_experts)]
    num_hosts = draw.choice([2, 3])
    hosts = [HostFacts(draw.choice([1, 2]), draw.choice([3, 4, math.inf])) for _ in range(num_hosts)]
    search = BranchAndBound(placement._problem(experts, hosts, ()), math.inf, 10**6)
    result = slowest_time(search.best, experts, hosts) if search.best else math.inf
    assert result == optimum(experts, hosts)


def test_branch_and_bound_spreads_experts_without_work() -> None:
    experts = experts_of_work(*[0] * 6, 31, 30, 27, 25, 24, 19, 17, 11)
    hosts = hosts_of_speed(1, 1.9, 4.2)
    best = BranchAndBound(placement._problem(experts, hosts, ()), math.inf, 10_000).best
    assert best is not None
    assert sorted(map(best.count, range(3))) == [4, 5, 5]


@pytest.mark.parametrize("block", range(10))
def test_the_heuristic_is_within_five_percent_of_the_optimum(block: int) -> None:
    for seed in range(1000 + 40 * block, 1040 + 40 * block):
        experts, hosts = random_case(seed, (6, 3), (7, 2), (5, 4), (4, 5))
        host_of, _ = heuristic(placement._problem(experts, hosts, ()))
        assert host_of is not None
        assert slowest_time(host_of, experts, hosts) <= 1.05 * optimum(experts, hosts), (seed, experts, hosts)


def test_the_largest_experts_come_first_where_the_heaviest_first_do_not_fit() -> None:
    """Neither greedy by work nor round robin has memory for the two experts of 5 bytes."""
    experts = [ExpertCost(9, 2), ExpertCost(6, 5), ExpertCost(8, 5)]
    problem = placement._problem(experts, [HostFacts(1, 6), HostFacts(1, 8)], ())
    assert heuristic(problem)[0] in ([1, 1, 0], [1, 0, 1])


def random_problem(draw: random.Random, num_experts: int, num_hosts: int) -> PlacementProblem:
    experts = [ExpertCost(draw.randint(0, 20), draw.randint(1, 4)) for _ in range(num_experts)]
    memory = [draw.choice([math.inf, 5 * num_experts / num_hosts]) for _ in range(num_hosts)]
    hosts = [HostFacts(draw.choice([0.5, 1, 2, 3]), num_bytes) for num_bytes in memory]
    return placement._problem(experts, hosts, ())


@pytest.mark.parametrize("seed", range(20))
def test_a_state_after_moves_is_that_of_its_assignment(seed: int) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw, 9, 4)
    state = _SearchState(problem, [draw.randrange(4) for _ in range(9)])
    for _ in range(12):
        expert = draw.randrange(9)
        others = [host for host in range(4) if host != state.host_of[expert]]
        state.move(expert, draw.choice(others))
        fresh = _SearchState(problem, state.host_of)
        assert (state.load, state.free, state.held) == (fresh.load, fresh.free, fresh.held)
        assert state.by_time == fresh.by_time
        assert state.slowest == max(map(state.time, range(4)))


def best_swap_by_scan(state: _SearchState, last: int, hosts: list[int]) -> float:
    """The time of the slower of two hosts after the best move or swap between the last one and another."""
    problem = state.problem
    best = state.time(last)
    for host in hosts:
        for work, expert in state.held[last]:
            for other_work, other in [(0.0, -1), *state.held[host]]:
                shift = work - other_work
                growth = problem.bytes[expert] - (problem.bytes[other] if other >= 0 else 0)
                if state.free[host] - growth >= 0 and state.free[last] + growth >= 0:
                    times = (
                        (state.load[last] - shift) / problem.speed[last],
                        (state.load[host] + shift) / problem.speed[host],
                    )
                    best = min(best, max(times))
    return best


@pytest.mark.parametrize("seed", range(200))
def test_the_best_swap_is_that_of_a_scan(seed: int) -> None:
    """Other hosts hold at most four experts: all of them are tried."""
    draw = random.Random(seed)
    problem = random_problem(draw, 9, 4)
    host_of = [0, 0, 0, *draw.choices([1, 2, 3], k=6)]
    if any(host_of.count(host) > 2 for host in (1, 2, 3)):
        host_of[3:] = [1, 1, 2, 2, 3, 3]
    state = _SearchState(problem, host_of)
    last = state.by_time[-1][1]
    hosts = [host for host in range(4) if host != last]
    expected = best_swap_by_scan(state, last, hosts)
    before = state.time(last)
    moves = _best_swap(state, last, hosts)
    assert bool(moves) == (expected < before)
    touched = {last, *(host for _, host in moves)}
    for expert, host in moves:
        state.move(expert, host)
    assert max(map(state.time, touched)) == pytest.approx(expected, rel=1e-12)
    assert not moves or min(state.free[host] for host in touched) >= 0


def test_experts_and_hosts_that_are_alike_are_not_tried_in_every_order() -> None:
    """Of 3^12 assignments most are alike; without the order of equal experts 1,330 would be tried."""
    experts = experts_of_work(*[5] * 7, *[3] * 5)
    search = BranchAndBound(placement._problem(experts, hosts_of_speed(1, 1, 2), ()), math.inf, 10**6)
    assert search.best == [0, 1, 1, 2, 2, 2, 2, 0, 0, 1, 2, 2]
    assert 10**6 - search.tries_left == 87
