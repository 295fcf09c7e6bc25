"""Longest processing time first, against a scan of all hosts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from experts.placement import placement
from experts.placement.placement import ExpertCost, HostFacts
from experts.placement.problem import Problem
from experts.placement.search import longest_first


def by_scan(problem: Problem, order: Sequence[int]) -> list[int]:
    hosts = range(len(problem.speed))
    load = [0.0 for _ in hosts]
    free = list(problem.memory)
    num_held = [0 for _ in hosts]
    host_of = [0] * len(problem.work)
    for expert in order:
        work = problem.work[expert]
        size = problem.bytes[expert]
        keys: dict[int, tuple[float, float]] = {}
        for host in hosts:
            time = (load[host] + work) / problem.speed[host]
            if free[host] >= size:
                keys[host] = (time, num_held[host]) if work else (num_held[host], time)
        chosen = min(keys, key=keys.__getitem__)
        host_of[expert] = chosen
        load[chosen] += work
        free[chosen] -= size
        num_held[chosen] += 1
    return host_of


@pytest.mark.parametrize("speeds", [[1], [1, 2, 4], [1, 1.001, 1.002], [1, 2, 4, None], [None]])
@pytest.mark.parametrize(("num_experts", "num_hosts"), [(7, 3), (90, 8), (300, 40), (500, 200)])
def test_the_hosts_are_those_of_a_scan(num_experts: int, num_hosts: int, speeds: list[float | None]) -> None:
    """On hosts of few speeds, on hosts with a speed of their own each (None), and on both."""
    draw = random.Random(5)
    experts: list[ExpertCost] = []
    for _ in range(num_experts):
        work = draw.choice([0, draw.randint(1, 9), round(100 * draw.paretovariate(1))])
        experts.append(ExpertCost(work, draw.randint(1, 4)))
    memory = 4 * num_experts / num_hosts
    hosts = [HostFacts(draw.choice(speeds) or draw.uniform(1, 4), memory) for _ in range(num_hosts)]
    problem = placement._problem(experts, hosts, ())
    by_work = sorted(range(num_experts), key=lambda e: (-problem.work[e], -problem.bytes[e]))
    shuffled = draw.sample(range(num_experts), num_experts)
    for order in (by_work, shuffled):
        assert longest_first(problem, order) == by_scan(problem, order)


def test_of_hosts_that_finish_together_the_one_with_fewer_experts_is_chosen() -> None:
    """The last expert would end at time 2 on a host that has two experts, and on one that has one."""
    work = [90.0, 80.0, 60.0, 90.0, 60.0]
    problem = Problem(work, [1.0] * 5, [120.0, 60.0, 61.0], [9.0] * 3)
    assert longest_first(problem, range(5)) == [0, 2, 1, 0, 1] == by_scan(problem, range(5))


def test_experts_that_fit_nowhere_have_no_placement() -> None:
    problem = placement._problem([ExpertCost(1, 3)] * 3, [HostFacts(1, 5), HostFacts(2, 5)], ())
    assert longest_first(problem, [0, 1, 2]) is None
