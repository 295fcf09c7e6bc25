"""The placement problem in plain numbers: work and memory of experts, speed and memory of hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

# Multiples of the lower bound. Up to the first, no assignment is better; up to the second, none is
# better by more than the error of the measured speeds.
PROVEN = 1 + 1e-9
CLOSE = 1 + 5e-4


@dataclass(frozen=True)
class Problem:
    """The experts of a layer and the hosts that they are divided among.

    The layer waits for the slowest host. The experts of a host must fit into its memory."""

    work: Sequence[float]
    """FLOPs per step of each expert, or any other unit of work."""
    bytes: Sequence[float]
    """Memory that each expert needs."""
    speed: Sequence[float]
    """Units of work that each host does in a second."""
    memory: Sequence[float]
    """Bytes that each host has left for experts."""
    sync_seconds: Sequence[float] = ()
    """Seconds in which the gradient of each expert passes a link. Empty where none is copied."""
    update_seconds: Sequence[float] = ()
    """Seconds in which a host updates a copy of each expert. Empty where none is copied."""

    @property
    def mean(self) -> float:
        """Seconds per step of all hosts, were the work divided evenly."""
        return math.fsum(self.work) / math.fsum(self.speed)


def lower_bound(work: Sequence[float], speed: Sequence[float]) -> float:
    """Return a lower bound of the slowest host's time, without copies.

    It is the largest of three: all work over all hosts; for any number n, the n heaviest experts
    over the n fastest hosts; and the time in which the hosts finish as many experts as light as the
    lightest, which is exact where all are alike."""
    total = math.fsum(work) / math.fsum(speed)
    heaviest = accumulate(sorted(work, reverse=True))
    fastest = accumulate(sorted(speed, reverse=True))
    partial = [work_sum / speed_sum for work_sum, speed_sum in zip(heaviest, fastest, strict=False)]
    return max([total, *partial, _time_of_equal_experts(min(work, default=0.0), len(work), speed)])


def _time_of_equal_experts(work: float, count: int, speed: Sequence[float]) -> float:
    """Return the least time of the slowest host for so many experts of this work."""
    # Each host takes its even share, rounded down. The rest goes to the host that is done first, in turn.
    even = count / math.fsum(speed)
    counts = [math.floor(even * each) for each in speed]
    slowest = max(num * work / each for num, each in zip(counts, speed, strict=True))
    queue = [((num + 1) * work / each, num + 1, each) for num, each in zip(counts, speed, strict=True)]
    heapify(queue)
    for _ in range(count - sum(counts)):
        slowest, num, each = queue[0]
        heapreplace(queue, ((num + 1) * work / each, num + 1, each))
    return slowest


def bytes_as_work(problem: Problem) -> Problem:
    """Return the problem of filling the memory: its experts fit where no host takes longer than 1."""
    return Problem(
        work=problem.bytes,
        bytes=[0.0] * len(problem.bytes),
        # A host without memory has a little, since speeds are above 0.
        speed=[max(memory, 1e-9) for memory in problem.memory],
        memory=[math.inf] * len(problem.memory),
    )


def first_overfull_host(host_of: Sequence[int], problem: Problem) -> tuple[int, float] | None:
    """Return the first host whose experts exceed its memory, and the bytes that they need."""
    needed = [0.0] * len(problem.memory)
    for size, host in zip(problem.bytes, host_of, strict=True):
        needed[host] += size
    for host, size in enumerate(needed):
        if size > problem.memory[host]:
            return host, size
    return None
