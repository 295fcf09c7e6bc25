"""The actions of the search against a scan of all of them, and its detours."""

from __future__ import annotations

import math
import random

import pytest

from experts.placement import placement
from experts.placement.division import Division, SearchBudget, on_one_host_each
from experts.placement.placement import ExpertCost, HostFacts
from experts.placement.problem import Problem
from experts.placement.search import SearchLimits, _actions, improve, placed
from harness.moe.placement_oracle import experts_of_work, fits, hosts_of_speed, slowest_time

LIMITS = SearchLimits(1.0)


def random_problem(draw: random.Random, num_experts: int, num_hosts: int) -> Problem:
    experts = [ExpertCost(draw.randint(0, 20), draw.randint(1, 4)) for _ in range(num_experts)]
    memory = [draw.choice([math.inf, 5 * num_experts / num_hosts]) for _ in range(num_hosts)]
    hosts = [HostFacts(draw.choice([0.5, 1, 2, 3]), num_bytes) for num_bytes in memory]
    return placement._problem(experts, hosts, ())


def best_exchange_by_scan(division: Division, source: int) -> float:
    """The most that a move or a swap between the slowest host and another wins, above the mean."""
    problem = division.problem
    seconds = division.seconds_LH[0]
    mean = problem.mean
    hosts = division.alone_E.tolist()
    best = 0.0
    for expert in (expert for expert, host in enumerate(hosts) if host == source):
        for other in [None, *range(len(hosts))]:
            for host in range(len(problem.speed)) if other is None else [hosts[other]]:
                if host == source:
                    continue
                work = problem.work[expert] - (problem.work[other] if other is not None else 0)
                growth = problem.bytes[expert] - (problem.bytes[other] if other is not None else 0)
                if division.free_H[host] >= growth and division.free_H[source] >= -growth:
                    left = seconds[source] - work / problem.speed[source]
                    there = seconds[host] + work / problem.speed[host]
                    best = max(best, max(seconds[source], mean) - max(left, there, mean))
    return best


@pytest.mark.parametrize("seed", range(100))
def test_the_best_exchange_is_that_of_a_scan(seed: int) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw, 9, 4)
    host_of = [draw.randrange(4) for _ in range(9)]
    division = Division([problem], on_one_host_each(host_of), SearchBudget())
    if division.is_overfull:
        return
    source = int(division.seconds_LH[0].argmax())
    expected = best_exchange_by_scan(division, source)
    best = _actions(division, LIMITS, frozenset(), 1)
    assert max((action.value for action in best), default=0.0) == pytest.approx(expected, abs=1e-6)
    for action in best:
        action.apply(division)
        assert not division.is_overfull


def test_the_largest_experts_come_first_where_the_heaviest_first_do_not_fit() -> None:
    """Neither the heaviest first nor round robin has memory for the two experts of 5 bytes."""
    experts = [ExpertCost(9, 2), ExpertCost(6, 5), ExpertCost(8, 5)]
    problem = placement._problem(experts, [HostFacts(1, 6), HostFacts(1, 8)], ())
    assert placed(problem) in ([1, 1, 0], [1, 0, 1])


def test_where_no_start_fits_the_bytes_are_divided_first() -> None:
    """The largest first leaves 2, 2 and 1 bytes for experts of 2, 2 and 1 bytes only by a swap."""
    experts = [ExpertCost(1, size) for size in (6, 5, 4, 3, 2)]
    hosts = [HostFacts(1, 11), HostFacts(1, 9)]
    host_of = placed(placement._problem(experts, hosts, ()))
    assert host_of is not None
    assert fits(host_of, experts, hosts)


def test_detours_leave_local_minima() -> None:
    ratios: list[float] = []
    for seed in range(30):
        draw = random.Random(seed)
        experts = experts_of_work(*[draw.randint(1, 30) for _ in range(9)])
        hosts = hosts_of_speed(1, 1, 2)
        problem = placement._problem(experts, hosts, ())
        before = on_one_host_each([draw.randrange(3) for _ in range(9)])
        reached: list[float] = []
        for detours in (0, 8):
            shares = improve([problem], before, SearchLimits(1.0, detours=detours), SearchBudget())
            reached.append(slowest_time([copies[0][0] for copies in shares], experts, hosts))
        ratios.append(reached[1] / reached[0])
    assert max(ratios) <= 1
    assert min(ratios) < 0.99
