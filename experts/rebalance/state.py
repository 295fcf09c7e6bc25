"""A division of the work of one layer's experts among hosts, under one or several loads.

The time of a host is the work of its experts over its speed; the layer waits for the slowest host. Copies
divide the work of an expert among hosts, in the same shares under all loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experts.copy_costs import ring_factor

_ROUNDS = 30  # over all copied experts, until their shares are settled
_SETTLED = 1e-4  # of all tokens of an expert

_Copies = tuple[tuple[int, float], ...]
Shares = tuple[_Copies, ...]
"""The hosts of each expert in ascending order, with the shares of its tokens, which sum to 1."""


@dataclass(frozen=True)
class BalanceProblem:
    """The work of one layer's experts under some load, and the hosts."""

    work: tuple[float, ...]
    """FLOPs per step of each expert."""
    bytes: tuple[float, ...]
    """State of each expert."""
    sync_seconds: tuple[float, ...]
    """Seconds in which the gradient of each expert passes a link."""
    update_seconds: tuple[float, ...]
    """Seconds in which a host updates a copy of each expert."""
    speed: tuple[float, ...]
    memory: tuple[float, ...]
    """Bytes of each host that other layers leave."""

    @property
    def mean(self) -> float:
        """Seconds per step of all hosts, were the work divided evenly."""
        return math.fsum(self.work) / math.fsum(self.speed)


@dataclass
class SearchBudget:
    """Work that a search may still do, counted in times of hosts that it computes.

    It bounds a decision by a number and not by a clock: the same on every machine."""

    left: float = math.inf
    _floor: float = 0.0

    def begin_part(self, share: float) -> None:
        """Begin a part that may spend this share of what is left; the rest is kept for the others."""
        self._floor = self.left - self.left * share if share < 1 else 0.0

    def spend(self, count: int) -> None:
        self.left -= count

    @property
    def is_spent(self) -> bool:
        return self.left <= self._floor


def host_seconds(problem: BalanceProblem, shares: Shares) -> list[float]:
    """Return the time of each host."""
    load = [0.0] * len(problem.speed)
    for work, copies in zip(problem.work, shares, strict=True):
        for host, share in copies:
            load[host] += work * share
    return [each / speed for each, speed in zip(load, problem.speed, strict=True)]


def imbalance(problem: BalanceProblem, shares: Shares) -> float:
    """Return the slowest host's time as a multiple of the mean; 1 where there is no work."""
    return max(host_seconds(problem, shares)) / problem.mean if problem.mean else 1.0


def copy_seconds(problem: BalanceProblem, shares: Shares) -> float:
    """Return the seconds per step in which the busiest host sums gradients of copies and updates them."""
    busy = [0.0] * len(problem.speed)
    for sync_s, update_s, copies in zip(problem.sync_seconds, problem.update_seconds, shares, strict=True):
        if len(copies) > 1:
            for host, _ in copies:
                busy[host] += sync_s * ring_factor(len(copies)) + update_s
    return max(busy)


def resplit(problems: Sequence[BalanceProblem], shares: Shares, budget: SearchBudget) -> Shares:
    """Give the copies the shares with which the slowest host is fastest.

    Under several loads, they are a compromise."""
    state = BalanceState(problems, shares, budget)
    state.settle()
    return state.shares


class BalanceState:
    """A division of the work that changes: the loads and the free memory of the hosts."""

    def __init__(self, problems: Sequence[BalanceProblem], shares: Shares, budget: SearchBudget) -> None:
        self.budget = budget
        self.problem = problems[0]
        """Of which everything but the work holds for all."""
        self.works = [problem.work for problem in problems]
        self.means = [problem.mean for problem in problems]
        self.copies = [dict(copies) for copies in shares]
        self.loads = [[0.0] * len(self.problem.speed) for _ in problems]
        self.free = list(self.problem.memory)
        self.bytes_moved = 0.0
        self._first_hosts = [frozenset(copies) for copies in self.copies]
        self.held: list[set[int]] = [set() for _ in self.free]
        """The experts that each host has a copy of."""
        for expert, copies in enumerate(self.copies):
            for host, share in copies.items():
                self._add_load(expert, host, share)
                self.free[host] -= self.problem.bytes[expert]
                self.held[host].add(expert)

    @property
    def shares(self) -> Shares:
        return tuple(tuple(sorted(copies.items())) for copies in self.copies)

    def seconds(self, load: int, host: int, more_work: float = 0.0) -> float:
        """Return the time of a host under one of the loads."""
        return (self.loads[load][host] + more_work) / self.problem.speed[host]

    def slowest(self, load: int) -> int:
        return max(range(len(self.free)), key=lambda host: (self.seconds(load, host), -host))

    def even_transfer(self, load: int, source: int, destination: int) -> float:
        """Return the work that, given to the destination, makes both hosts finish together."""
        speed = self.problem.speed
        difference = self.seconds(load, source) - self.seconds(load, destination)
        return difference / (1 / speed[source] + 1 / speed[destination])

    def price(self, expert: int, host: int) -> float:
        """Return the bytes that reach a host with an expert: none where it was at first."""
        return 0.0 if host in self._first_hosts[expert] else self.problem.bytes[expert]

    def alone(self, host: int) -> list[int]:
        """Return the experts of a host that have no other copy."""
        return sorted(expert for expert in self.held[host] if len(self.copies[expert]) == 1)

    def move(self, expert: int, source: int, destination: int) -> None:
        self.copy(expert, destination)
        self.divide(expert, {source: 0.0, destination: 1.0})
        del self.copies[expert][source]
        self.held[source].remove(expert)
        self.free[source] += self.problem.bytes[expert]

    def copy(self, expert: int, destination: int) -> None:
        """Add a copy, which has no share yet."""
        self.bytes_moved += self.price(expert, destination)
        self.free[destination] -= self.problem.bytes[expert]
        self.held[destination].add(expert)
        self.copies[expert][destination] = 0.0

    def settle(self) -> None:
        """Divide the copied experts so that their hosts finish together.

        Equal shares at the beginning: where several divisions are as good, the most even one stands
        other loads best."""
        speed = self.problem.speed
        for expert, copies in enumerate(self.copies):
            if len(copies) > 1:
                total_speed = sum(speed[host] for host in copies)
                self.divide(expert, {host: speed[host] / total_speed for host in copies})
        self.adjust()

    def adjust(self, rounds: int = _ROUNDS) -> None:
        """Divide each copied expert so that its hosts finish together, in turn until all do.

        Each turn lowers the sum of squared times over hosts and loads. Under one load its minimum is
        that of the slowest time too."""
        copied = [expert for expert, copies in enumerate(self.copies) if len(copies) > 1]
        for _ in range(rounds):
            changes = [self.divide(e, self.even_shares(e, list(self.copies[e]), 1.0)) for e in copied]
            if max(changes, default=0.0) <= _SETTLED or self.budget.is_spent:
                break

    def divide(self, expert: int, shares: dict[int, float]) -> float:
        """Set the shares of some copies of an expert, and return the largest change."""
        copies = self.copies[expert]
        largest = 0.0
        for host, share in shares.items():
            change = share - copies[host]
            self._add_load(expert, host, change)
            copies[host] = share
            largest = max(largest, abs(change))
        return largest

    def even_shares(self, expert: int, hosts: Sequence[int], total: float) -> dict[int, float]:
        """Divide a share of an expert among hosts so that these finish together.

        A host that is busy longer with other experts gets nothing."""
        self.budget.spend(len(hosts) * len(self.works))
        works = [work[expert] for work in self.works]
        squares = sum(work * work for work in works)
        copies = self.copies[expert]
        speed = self.problem.speed
        # Under several loads, each counts as much as the expert weighs in it.
        others = [
            sum(
                work * (load[host] - work * copies.get(host, 0.0))
                for work, load in zip(works, self.loads, strict=True)
            )
            for host in hosts
        ]
        pairs = [(other, speed[host]) for other, host in zip(others, hosts, strict=True)]
        level = water_level(squares * total, pairs)
        parts = [max(0.0, level * each_speed - other) for other, each_speed in pairs]
        filled = sum(parts)
        if not filled:  # no work, or less than rounding leaves of it
            return {host: total / len(hosts) for host in hosts}
        return {host: total * part / filled for host, part in zip(hosts, parts, strict=True)}

    def _add_load(self, expert: int, host: int, share: float) -> None:
        for load, work in zip(self.loads, self.works, strict=True):
            load[host] += work[expert] * share


def worst_load(state: BalanceState) -> int:
    """Return the load under which the slowest host is slowest, compared with the mean."""
    return max(range(len(state.loads)), key=lambda load: (excess(state, load), -load))


def excess(state: BalanceState, load: int) -> float:
    """Return the slowest host's time as a multiple of the mean, under one of the loads."""
    mean = state.means[load]
    return state.seconds(load, state.slowest(load)) / mean if mean else 1.0


def water_level(work: float, hosts: Sequence[tuple[float, float]]) -> float:
    """Return the time at which hosts with some (load, speed) finish ``work`` more together."""
    load_sum = work
    speed_sum = 0.0
    level = math.inf
    for load, speed in sorted(hosts, key=lambda host: host[0] / host[1]):
        if load / speed >= level:
            break
        load_sum += load
        speed_sum += speed
        level = load_sum / speed_sum
    return level
