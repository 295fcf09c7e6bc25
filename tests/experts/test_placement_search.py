"""The heuristic and the branch and bound, each by itself, against enumeration."""

from __future__ import annotations

import math
import random

import pytest

from experts import placement
from experts.placement import ExpertCost, HostFacts
from experts.placement_search import BranchAndBound, heuristic
from tests.support.placement_oracle import (
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
