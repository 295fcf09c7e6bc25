"""A division of the work of one layer's experts among hosts, under one or several loads.

The time of a host is the work of its experts over its speed; the layer waits for the slowest host. Copies
divide the work of an expert among hosts, in the same shares under all loads.

Letters of shapes: L loads, E experts, H hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from experts.copy_costs import ring_factor
from experts.placement.problem import Problem

_ROUNDS = 30  # over all copied experts, until their shares are settled
_SETTLED = 1e-4  # of all tokens of an expert
_ROUNDS_AFTER_REMOVAL = 3
_AS_GOOD = 1.001  # times an imbalance

Shares = tuple[tuple[tuple[int, float], ...], ...]
"""The hosts of each expert in ascending order, with the shares of its tokens, which sum to 1."""


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


def host_seconds(problem: Problem, shares: Shares) -> list[float]:
    """Return the time of each host."""
    load = [0.0] * len(problem.speed)
    for work, copies in zip(problem.work, shares, strict=True):
        for host, share in copies:
            load[host] += work * share
    return [each / speed for each, speed in zip(load, problem.speed, strict=True)]


def imbalance(problem: Problem, shares: Shares) -> float:
    """Return the slowest host's time as a multiple of the mean; 1 where there is no work."""
    return max(host_seconds(problem, shares)) / problem.mean if problem.mean else 1.0


def copy_seconds(problem: Problem, shares: Shares) -> float:
    """Return the seconds per step in which the busiest host sums gradients of copies and updates them."""
    busy = [0.0] * len(problem.speed)
    for sync_s, update_s, copies in zip(problem.sync_seconds, problem.update_seconds, shares, strict=True):
        if len(copies) > 1:
            for host, _ in copies:
                busy[host] += sync_s * ring_factor(len(copies)) + update_s
    return max(busy)


def on_one_host_each(host_of: Sequence[int]) -> Shares:
    return tuple(((host, 1.0),) for host in host_of)


def resplit(problems: Sequence[Problem], shares: Shares, budget: SearchBudget) -> Shares:
    """Give the copies the shares with which the slowest host is fastest.

    Under several loads, they are a compromise."""
    division = Division(problems, shares, budget)
    division.settle()
    return division.shares


class Division:
    """A division of the work that changes: the loads and the free memory of the hosts."""

    def __init__(self, problems: Sequence[Problem], shares: Shares, budget: SearchBudget) -> None:
        self.budget = budget
        self.problem = problems[0]
        """Of which everything but the work holds for all."""
        self.works = [problem.work for problem in problems]
        self.work_LE = np.array(self.works, dtype=np.float64)
        self.bytes_E = np.array(self.problem.bytes, dtype=np.float64)
        self.speed_H = np.array(self.problem.speed, dtype=np.float64)
        self.mean_L = np.array([problem.mean for problem in problems])
        self.copies = [dict(copies) for copies in shares]
        self.first_hosts = [frozenset(copies) for copies in self.copies]
        self.bytes_moved = 0.0
        self.free_H = np.array(self.problem.memory, dtype=np.float64)
        self.alone_E = np.full(len(shares), -1)
        """The host of an expert without copies; -1 for a copied expert."""
        self._loads = [[0.0] * len(self.speed_H) for _ in problems]
        self._seconds_LH: np.ndarray | None = None
        for expert, copies in enumerate(self.copies):
            for host, share in copies.items():
                self._add_load(expert, host, share)
                self.free_H[host] -= self.bytes_E[expert]
            self._note_copies(expert)

    def clone(self) -> Division:
        clone = copy(self)
        clone.copies = [dict(copies) for copies in self.copies]
        clone.free_H = self.free_H.copy()
        clone.alone_E = self.alone_E.copy()
        clone._loads = [list(load) for load in self._loads]
        return clone

    @property
    def shares(self) -> Shares:
        return tuple(tuple(sorted(copies.items())) for copies in self.copies)

    @property
    def seconds_LH(self) -> np.ndarray:
        """The time of each host under each load."""
        if self._seconds_LH is None:
            self._seconds_LH = np.array(self._loads) / self.speed_H
        return self._seconds_LH

    @property
    def excess_L(self) -> np.ndarray:
        """The slowest host's time under each load, as a multiple of the mean; 1 where there is no work."""
        slowest_L = self.seconds_LH.max(1)
        return np.divide(slowest_L, self.mean_L, out=np.ones_like(slowest_L), where=self.mean_L > 0)

    @property
    def excess(self) -> float:
        """The same under the load where it is largest."""
        return float(self.excess_L.max())

    @property
    def is_overfull(self) -> bool:
        """Whether the experts of a host exceed its memory."""
        return bool(self.free_H.min() < 0)

    def all_copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return expert, host and share of each copy. An expert without copies counts as one."""
        alone = np.flatnonzero(self.alone_E >= 0)
        copied = np.flatnonzero(self.alone_E < 0).tolist()
        more = [(expert, *copy) for expert in copied for copy in self.copies[expert].items()]
        if not more:
            return alone, self.alone_E[alone], np.ones(len(alone))
        experts, hosts, shares = zip(*more, strict=True)
        return (
            np.concatenate((alone, experts)),
            np.concatenate((self.alone_E[alone], hosts)),
            np.concatenate((np.ones(len(alone)), shares)),
        )

    def move(self, expert: int, source: int, destination: int) -> None:
        """Move a copy with its share."""
        share = self.copies[expert][source]
        self.copy(expert, destination)
        self.divide(expert, {source: 0.0, destination: share})
        del self.copies[expert][source]
        self.free_H[source] += self.bytes_E[expert]
        self._note_copies(expert)

    def copy(self, expert: int, destination: int) -> None:
        """Add a copy, which has no share yet."""
        if destination not in self.first_hosts[expert]:
            self.bytes_moved += self.problem.bytes[expert]
        self.free_H[destination] -= self.bytes_E[expert]
        self.copies[expert][destination] = 0.0
        self._note_copies(expert)

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

    def adjust(self, rounds: int = _ROUNDS, hosts: frozenset[int] = frozenset()) -> None:
        """Divide each copied expert so that its hosts finish together, in turn until all do.

        With ``hosts``, only the experts that have a copy on one of them. Each turn lowers the sum of
        squared times over hosts and loads. Under one load its minimum is that of the slowest time too."""
        copied: list[int] = np.flatnonzero(self.alone_E < 0).tolist()
        if hosts:
            copied = [expert for expert in copied if not hosts.isdisjoint(self.copies[expert])]
        for _ in range(rounds):
            changes = [self.divide(expert, self._even_shares(expert)) for expert in copied]
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

    def _even_shares(self, expert: int) -> dict[int, float]:
        """Divide an expert among its hosts so that these finish together.

        A host that is busy longer with other experts gets nothing."""
        copies = self.copies[expert]
        self.budget.spend(1)
        speed = self.problem.speed
        # Under several loads, each counts as much as the expert weighs in it.
        weighed = [(work[expert], load) for work, load in zip(self.works, self._loads, strict=True)]
        square = sum(work * work for work, _ in weighed)
        others: list[tuple[float, float]] = []
        for host, share in copies.items():
            others.append((sum(work * (load[host] - work * share) for work, load in weighed), speed[host]))
        level = water_level(square, others)
        parts = [max(0.0, level * each_speed - other) for other, each_speed in others]
        filled = sum(parts)
        if not filled:  # no work, or less than rounding leaves of it
            return dict.fromkeys(copies, 1 / len(copies))
        return {host: part / filled for host, part in zip(copies, parts, strict=True)}

    def _add_load(self, expert: int, host: int, share: float) -> None:
        self._seconds_LH = None
        for load, work in zip(self._loads, self.works, strict=True):
            load[host] += work[expert] * share

    def _note_copies(self, expert: int) -> None:
        copies = self.copies[expert]
        self.alone_E[expert] = next(iter(copies)) if len(copies) == 1 else -1


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


def without_needless_copies(
    scenarios: Sequence[Sequence[Problem]], shares: Shares, aim: float, budget: SearchBudget
) -> Shares:
    """Remove the copies without which the hosts reach the aim, or what they reach now.

    That must hold in each scenario, which is one load, or several with the same shares."""
    limits = [max(aim, _worst(problems, shares, budget) * _AS_GOOD) for problems in scenarios]
    first_work = scenarios[0][0].work
    for expert in sorted(range(len(shares)), key=lambda e: (first_work[e], e)):
        while len(shares[expert]) > 1 and not budget.is_spent:
            # Of the copies, one of those with the least share is the most likely to be needless.
            host, _ = min(shares[expert], key=lambda copy: (copy[1], -copy[0]))
            fewer = _without_copy(shares, expert, host)
            pairs = zip(scenarios, limits, strict=True)
            if any(_worst(problems, fewer, budget) > limit for problems, limit in pairs):
                break
            shares = resplit(scenarios[0], fewer, budget)
    return shares


def _worst(problems: Sequence[Problem], shares: Shares, budget: SearchBudget) -> float:
    # A few rounds: the shares were good with one copy more.
    division = Division(problems, shares, budget)
    division.adjust(_ROUNDS_AFTER_REMOVAL)
    return division.excess


def _without_copy(shares: Shares, expert: int, host: int) -> Shares:
    """Divide the share of one copy evenly among the others."""
    left = [copy for copy in shares[expert] if copy[0] != host]
    more = dict(shares[expert])[host] / len(left)
    copies = tuple((each, share + more) for each, share in left)
    return (*shares[:expert], copies, *shares[expert + 1 :])
