"""Greedy placement: each expert goes to the host that would finish it first.

A scan of all hosts for every expert would be slow for thousands of them. Hosts of about one speed
share a priority queue, ordered by the time at which they would finish the lightest expert of a
block, so that few hosts are compared for each expert."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby, islice

from experts.placement.problem import PlacementProblem

_SPEED_CLASSES_PER_DOUBLING = 32
_ROUNDING = 1 - 1e-12  # times a bound: below any result of its rounding
_FIRST_BLOCK = 32  # experts
_HostKey = tuple[float, float, int]
"""Order of hosts: the time at which a host would finish, the number of its experts, and its index.
For an expert without work the first two are swapped."""


def greedy(problem: PlacementProblem, order: Sequence[int]) -> list[int] | None:
    """Assign each expert, in this order, to the host that would finish it first.

    Returns the host of each expert; None where an expert fits nowhere."""
    partial = _PartialPlacement(problem)
    speed_classes = _speed_classes(problem.speed)
    for block in _blocks(problem, order):
        queues = _make_queues(partial, speed_classes, block)
        for expert in block:
            if not _assign(partial, queues, expert):
                return None
    return partial.host_of


class _PartialPlacement:
    """The experts assigned so far, and the load, free memory and number of experts of each host."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.host_of = [0] * len(problem.work)
        self.load = [0.0] * len(problem.speed)
        self.free = list(problem.memory)
        self.num_held = [0] * len(problem.speed)

    def key(self, host: int, work: float) -> _HostKey:
        """Return the key of a host for an expert with so much work."""
        time = (self.load[host] + work) / self.problem.speed[host]
        return (time, self.num_held[host], host) if work else (self.num_held[host], time, host)

    def assign(self, expert: int, host: int) -> None:
        self.host_of[expert] = host
        self.load[host] += self.problem.work[expert]
        self.free[host] -= self.problem.bytes[expert]
        self.num_held[host] += 1


@dataclass(frozen=True)
class _HostQueue:
    """Hosts of about one speed, ordered by when they would finish a block's lightest expert."""

    heap: list[_HostKey]
    lightest: float
    """Work of the lightest expert of the block."""
    smallest: float
    """Bytes of the smallest expert of the block."""
    fastest: float
    """Speed of the fastest host."""
    one_speed: bool
    """Whether all hosts have the same speed, or the experts no work: then the order is the same for
    all experts of the block. Otherwise a host gains on the others at most at the speed of the
    fastest."""

    def may_improve(self, best: _HostKey, partial: _PartialPlacement, work: float) -> bool:
        """Whether a host of this queue may finish an expert before ``best``."""
        time_of_lightest, _, host = self.heap[0]
        if self.one_speed:
            return partial.key(host, work) < best
        return time_of_lightest + (work - self.lightest) / self.fastest * _ROUNDING <= best[0]

    def requeue(self, hosts: Iterable[int], partial: _PartialPlacement) -> None:
        """Put hosts back, except those with too little memory for any expert of the block."""
        for host in hosts:
            if partial.free[host] >= self.smallest:
                heappush(self.heap, partial.key(host, self.lightest))


def _speed_classes(speed: Sequence[float]) -> list[list[int]]:
    """Group hosts by speed.

    A speed that many hosts share is a class of its own; the others are grouped by similarity."""
    many = math.sqrt(len(speed))
    num_hosts_at = Counter(speed)
    classes: dict[tuple[bool, float], list[int]] = {}
    for host, each in enumerate(speed):
        shared = num_hosts_at[each] >= many
        value = each if shared else math.floor(_SPEED_CLASSES_PER_DOUBLING * math.log2(each))
        classes.setdefault((shared, value), []).append(host)
    return list(classes.values())


def _make_queues(
    partial: _PartialPlacement, speed_classes: list[list[int]], block: Sequence[int]
) -> list[_HostQueue]:
    problem = partial.problem
    lightest = min(problem.work[expert] for expert in block)
    smallest = min(problem.bytes[expert] for expert in block)
    # Experts without work are ordered by the number of experts on a host, whatever its speed: one
    # queue.
    classes = speed_classes if lightest else [[*range(len(problem.speed))]]
    queues: list[_HostQueue] = []
    for hosts in classes:
        heap = [partial.key(host, lightest) for host in hosts if partial.free[host] >= smallest]
        heapify(heap)
        speeds = [problem.speed[host] for host in hosts]
        one_speed = not lightest or min(speeds) == max(speeds)
        queues.append(_HostQueue(heap, lightest, smallest, max(speeds), one_speed))
    return queues


def _assign(partial: _PartialPlacement, queues: Sequence[_HostQueue], expert: int) -> bool:
    """Assign the expert to the host that would finish it first. Returns whether it fits on any."""
    work = partial.problem.work[expert]
    size = partial.problem.bytes[expert]
    best: _HostKey | None = None
    popped: list[tuple[_HostQueue, list[int]]] = []
    for queue in queues:
        hosts: list[int] = []
        while queue.heap and (best is None or queue.may_improve(best, partial, work)):
            *_, host = heappop(queue.heap)
            hosts.append(host)
            if partial.free[host] >= size:
                key = partial.key(host, work)
                best = key if best is None else min(best, key)
                if queue.one_speed:
                    break  # the first host with enough memory is the queue's best
        if hosts:
            popped.append((queue, hosts))
    if best is None:
        return False
    partial.assign(expert, best[-1])
    # After the assignment: the host has another key now.
    for queue, hosts in popped:
        queue.requeue(hosts, partial)
    return True


def _blocks(problem: PlacementProblem, order: Sequence[int]) -> Iterator[list[int]]:
    """Cut the experts into blocks, all with work or all without.

    The first blocks are short, because the work of the heaviest experts falls steeply. Later ones
    are so long that making the queues costs little compared with their use."""
    size = _FIRST_BLOCK
    max_size = max(_FIRST_BLOCK, len(problem.speed) // 4)
    for _, experts in groupby(order, key=lambda expert: problem.work[expert] > 0):
        while block := list(islice(experts, size)):
            yield block
            size = min(2 * size, max_size)
