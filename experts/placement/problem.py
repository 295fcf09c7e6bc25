"""The placement problem in plain numbers: work and memory of experts, speed and memory of hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Multiples of the lower bound. Up to the first, no assignment is better; up to the second, none is
# better by more than the error of the measured speeds.
PROVEN = 1 + 1e-9
CLOSE = 1 + 5e-4


@dataclass(frozen=True)
class PlacementProblem:
    """Experts to assign to hosts so that the slowest host finishes as early as possible.

    The experts of a host must fit into its memory."""

    work: list[float]
    """Work of each expert, in whole units: sums are exact in any order."""
    bytes: list[float]
    """Memory that each expert needs."""
    speed: list[float]
    """Units of work that each host does in a unit of time."""
    memory: list[float]
    """Bytes that each host has left for experts."""
    bound: float
    """A lower bound of the slowest host's time."""


def lower_bound(work: Sequence[float], speed: Sequence[float]) -> float:
    """Return a lower bound of the slowest host's time.

    It is the larger of two: all work over all hosts, and for any number n, the n heaviest experts
    over the n fastest hosts."""
    total = math.fsum(work) / math.fsum(speed)
    heaviest = accumulate(sorted(work, reverse=True))
    fastest = accumulate(sorted(speed, reverse=True))
    partial = [work_sum / speed_sum for work_sum, speed_sum in zip(heaviest, fastest, strict=False)]
    return max([total, *partial])


def first_overfull_host(
    host_of: Sequence[int],
    problem: PlacementProblem,
) -> tuple[int, float] | None:
    """Return the first host whose experts exceed its memory, and the bytes that they need."""
    needed = [0.0] * len(problem.memory)
    for size, host in zip(problem.bytes, host_of, strict=True):
        needed[host] += size
    for host, size in enumerate(needed):
        if size > problem.memory[host]:
            return host, size
    return None
