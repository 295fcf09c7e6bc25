"""Placement by enumeration: the slow, obvious form, and random cases to compare with."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from experts.placement.placement import ExpertCost, HostFacts


def experts_of_work(*work: float) -> list[ExpertCost]:
    return [ExpertCost(each) for each in work]


def hosts_of_speed(*speed: float) -> list[HostFacts]:
    return [HostFacts(each) for each in speed]


def fits(
    host_of: Sequence[int],
    experts: Sequence[ExpertCost],
    hosts: Sequence[HostFacts],
    used: Sequence[float] = (),
) -> bool:
    """Whether the experts fit into the memory of their hosts, of which ``used`` bytes are taken."""
    needed = list(used) or [0.0] * len(hosts)
    for expert, host in zip(experts, host_of, strict=True):
        needed[host] += expert.bytes
    return all(size <= host.memory for size, host in zip(needed, hosts, strict=True))


def slowest_time(
    host_of: Sequence[int],
    experts: Sequence[ExpertCost],
    hosts: Sequence[HostFacts],
) -> float:
    load = [0.0] * len(hosts)
    for expert, host in zip(experts, host_of, strict=True):
        load[host] += expert.work
    return max(work / host.speed for work, host in zip(load, hosts, strict=True))


def optimum(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts]) -> float:
    """The smallest slowest time of all assignments that fit; infinity if none does."""
    assignments = itertools.product(range(len(hosts)), repeat=len(experts))
    fitting = (host_of for host_of in assignments if fits(host_of, experts, hosts))
    return min((slowest_time(host_of, experts, hosts) for host_of in fitting), default=math.inf)


def random_case(seed: int, *shapes: tuple[int, int]) -> tuple[list[ExpertCost], list[HostFacts]]:
    """Heavy-tailed loads on hosts with speeds of 1:2:4, any speeds, or equal ones.

    A shape is the largest number of experts and the number of hosts."""
    draw = random.Random(seed)
    max_experts, num_hosts = draw.choice(shapes)
    any_speeds = [draw.uniform(1, 8) for _ in range(num_hosts)]
    speeds = draw.choice([[1, 2, 4, 4, 2, 1, 4], any_speeds, [1] * num_hosts])
    tail = draw.choice([0.8, 1.2, 3.0])
    work = [round(100 * draw.paretovariate(tail)) for _ in range(draw.randint(1, max_experts))]
    return experts_of_work(*work), hosts_of_speed(*speeds[:num_hosts])
