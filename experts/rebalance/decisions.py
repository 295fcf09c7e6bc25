"""Decisions to move and copy experts between hosts while training.

``decide`` compares what a change wins with what it costs. It wins the seconds by which the slowest host of
a layer gets faster, in each step for as long as such loads usually last. It costs the bytes that it sends
and the time to carry it out, once, and the sum of the copies' gradients and their update in each step. All
functions are pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import mul

from experts.placement.division import (
    SearchBudget,
    Shares,
    copy_seconds,
    host_seconds,
    imbalance,
    resplit,
    without_needless_copies,
)
from experts.placement.placement import ExpertCost
from experts.placement.problem import Problem
from experts.placement.search import SearchLimits, improve
from experts.rebalance.costs import (
    Cluster,
    LayerCosts,
    balance_problem,
    shares_of,
    used_memory,
    with_shares,
)
from experts.rebalance.load_history import LoadHistory, Loads
from experts.rebalance.plan import Plan, Transfer
from experts.structure import Change, LayerStructure

_MOST = 0.6  # of the weight of all windows
_FEW = 1 / 3  # of the seconds that are won in other windows
_LEAST_GAIN = 0.01  # of the mean time: a change that wins less is not worth an event


@dataclass(frozen=True)
class BalanceRules:
    """When experts move and are copied."""

    max_imbalance: float = 1.05
    """The slowest host's time as a multiple of the mean, up to which nothing is changed."""
    aim: float = 1.02
    """The multiple that a change aims at. Copies are removed where it holds without them. The distance
    to ``max_imbalance`` keeps small changes of the load from causing changes back and forth."""
    margin: float = 1.5
    """A change must win this multiple of the seconds that it costs."""
    max_copies: int | None = None
    """The most copies of an expert. None: one on each host."""
    max_bytes: float = math.inf
    """The most bytes that are sent at one point in time."""
    max_steps: float = 500
    """The most steps that a change may take to win its costs back."""
    max_search: float = 150_000
    """The most times of hosts that one decision computes, over all layers: one to two seconds."""

    def __post_init__(self) -> None:
        if not 1 <= self.aim <= self.max_imbalance:
            raise ValueError(
                f"the aim of balancing is {self.aim} and the tolerated imbalance {self.max_imbalance}; "
                f"they are multiples of the mean time of the hosts: 1 <= aim <= tolerated"
            )


def decide(
    layers: Sequence[LayerStructure],
    histories: Sequence[LoadHistory],
    costs: Sequence[LayerCosts],
    cluster: Cluster,
    rules: BalanceRules,
) -> tuple[Change, ...]:
    """Return the moves and copies that pay, in the order in which they are carried out.

    The layer that loses most time comes first, as long as the bytes of this point last. A layer waits
    until its history has two windows."""
    if rules.max_steps <= 0:
        return ()  # nothing is won any more
    layers = list(layers)
    changes: list[Change] = []
    bytes_left = rules.max_bytes
    search_left = rules.max_search
    order = _by_lost_seconds(layers, histories, costs, cluster)
    for number, index in enumerate(order):
        others = [i for i in range(len(layers)) if i != index]
        used = used_memory([layers[i] for i in others], [costs[i] for i in others], len(cluster.hosts))
        decision = _Decision(layers[index], histories[index], costs[index], cluster.without(used), rules)
        # Layers that need less leave more to the others.
        share = search_left / (len(order) - number)
        budget = SearchBudget(share)
        plan = decision.best_plan(bytes_left, budget)
        search_left -= share - budget.left
        if plan is not None:
            layers[index] = plan.after
            bytes_left -= plan.transfer.bytes
            changes += plan.changes(index)
    return tuple(changes)


def cheapest_host(
    layers: Sequence[LayerStructure],
    layer: int,
    newborn: ExpertCost,
    history: LoadHistory,
    costs: Sequence[LayerCosts],
    cluster: Cluster,
) -> int | None:
    """Return the host that would finish a newborn expert of a layer first; None where none has memory.

    Ties go to the host with the fewest experts of all layers, then to the lowest index. Where the
    history is of other experts, those of the layer count as equally loaded."""
    structure = layers[layer]
    num_hosts = len(cluster.hosts)
    loads = history.mean if history.ids == structure.ids else (1.0,) * len(structure.experts)
    problem = balance_problem(structure, loads, costs[layer], cluster)
    seconds = host_seconds(problem, shares_of(structure, num_hosts))
    left = cluster.without(used_memory(layers, costs, num_hosts)).hosts

    def finish(host: int) -> tuple[float, int, int]:
        num_held = sum(len(each.held(host)) for each in layers)
        return seconds[host] + newborn.work / left[host].speed, num_held, host

    fitting = [host for host in range(num_hosts) if left[host].memory >= newborn.bytes]
    return min(fitting, key=finish, default=None)


def layer_imbalance(
    layer: LayerStructure, loads: Sequence[float], costs: LayerCosts, cluster: Cluster
) -> float:
    """Return the slowest host's time as a multiple of the mean, for some loads of the experts."""
    problem = balance_problem(layer, tuple(loads), costs, cluster)
    return imbalance(problem, shares_of(layer, len(cluster.hosts)))


def _by_lost_seconds(
    layers: Sequence[LayerStructure],
    histories: Sequence[LoadHistory],
    costs: Sequence[LayerCosts],
    cluster: Cluster,
) -> list[int]:
    lost: dict[int, float] = {}
    for index, (layer, history) in enumerate(zip(layers, histories, strict=True)):
        if len(history.windows) > 1 and history.ids == layer.ids:
            problem = balance_problem(layer, history.mean, costs[index], cluster)
            slowest = max(host_seconds(problem, shares_of(layer, len(cluster.hosts))))
            lost[index] = slowest - problem.mean
    return sorted(lost, key=lambda index: (-lost[index], index))


class _Decision:
    """The decision for one layer."""

    def __init__(
        self,
        layer: LayerStructure,
        history: LoadHistory,
        costs: LayerCosts,
        cluster: Cluster,
        rules: BalanceRules,
    ) -> None:
        def problem(loads: Loads) -> Problem:
            return balance_problem(layer, loads, costs, cluster)

        self.layer = layer
        self.rules = rules
        self.cluster = cluster
        self.num_hosts = len(cluster.hosts)
        self.before = shares_of(layer, self.num_hosts)
        self.steps = history.expected_steps(rules.max_steps)
        self.weights = history.weights
        self.windows = [problem(window.loads) for window in history.windows]
        self.mean = problem(history.mean)
        self.long_mean = problem(history.long_mean)
        farthest = history.farthest()
        # Loads that alternate may be even in the mean, and need copies that suit both extremes.
        self.scenarios = [[self.mean]]
        if farthest is not None:
            self.scenarios.append([problem(farthest.loads), self.windows[-1]])
        self._slowest_before = self._slowest(self.before)
        self._copies_before = copy_seconds(self.mean, self.before)

    def best_plan(self, max_bytes: float, budget: SearchBudget) -> Plan | None:
        """Return the plan that wins most; None where none pays."""
        if self._is_balanced():
            return self._plan_without_needless_copies(budget)
        candidates = [self._plan(shares) for shares in self._candidates(max_bytes, budget)]
        affordable = [plan for plan in candidates if plan.transfer.bytes <= max_bytes]
        paying = [plan for plan in affordable if self._pays(plan)]
        return max(paying, key=lambda plan: plan.net_seconds(self.rules.margin), default=None)

    def _is_balanced(self) -> bool:
        """Whether the hosts were balanced in most windows: a short burst is no reason to change."""
        limit = self.rules.max_imbalance
        pairs = zip(self._slowest_before, self.windows, strict=True)
        uneven = [slowest > limit * window.mean for slowest, window in pairs]
        return sum(compress(self.weights, uneven)) < _MOST

    def _candidates(self, max_bytes: float, budget: SearchBudget) -> Iterator[Shares]:
        """Yield other hosts and shares: other shares alone, and those that searches find."""
        yield from (resplit(scenario, self.before, budget) for scenario in self.scenarios)
        max_copies = self.rules.max_copies or self.num_hosts
        # The price of a byte, in seconds per step.
        price = 1 / self.cluster.bandwidth / self.steps
        only_moves = SearchLimits(self.rules.aim, True, 1, max_bytes, price)
        only_copies = SearchLimits(self.rules.aim, False, max_copies, max_bytes, price)
        both = replace(only_copies, moves=True)
        # The searches that find most come first, and each may spend half of what is left.
        for limits, scenario in itertools.product((both, only_copies, only_moves), self.scenarios[::-1]):
            budget.begin_part(0.5)
            yield improve(scenario, self.before, limits, budget)
        budget.begin_part(1)
        for scenario in self.scenarios[1:]:
            # For loads that alternate: from what suits one after the other.
            shares = self.before
            for problem in scenario:
                shares = improve([problem], shares, both, budget)
            yield improve(scenario, shares, both, budget)
        fewer = self._without_needless_copies(budget)
        if fewer != self.before:
            yield from (improve(scenario, fewer, both, budget) for scenario in self.scenarios)

    def _plan_without_needless_copies(self, budget: SearchBudget) -> Plan | None:
        if all(len(expert.hosts) == 1 for expert in self.layer.experts):
            return None
        # It can wait: layers that are uneven come first.
        budget.begin_part(0.25)
        fewer = self._without_needless_copies(budget)
        if all(len(old) == len(new) for old, new in zip(self.before, fewer, strict=True)):
            return None
        plan = self._plan(fewer)
        # The copies may be of use in single windows still.
        return plan if plan.seconds_won >= -(self.rules.aim - 1) * self.mean.mean else None

    def _without_needless_copies(self, budget: SearchBudget) -> Shares:
        # The long mean keeps copies for loads that come and go.
        scenarios = [*self.scenarios, [self.long_mean]]
        return without_needless_copies(scenarios, self.before, self.rules.aim, budget)

    def _plan(self, shares: Shares) -> Plan:
        after = with_shares(self.layer, shares, self.num_hosts)
        rounded = shares_of(after, self.num_hosts)
        bandwidth = self.cluster.bandwidth
        slowest = self._slowest(rounded)
        more_copies = copy_seconds(self.mean, rounded) - self._copies_before
        won = [old - new - more_copies for old, new in zip(self._slowest_before, slowest, strict=True)]
        return Plan(
            self.layer,
            after,
            Transfer.between(self.layer, after, self.mean.bytes, self.num_hosts, bandwidth),
            self.cluster.change_seconds,
            tuple(won),
            sum(map(mul, self.weights, won)),
            self._mean_imbalance(self._slowest_before),
            self._mean_imbalance(slowest),
            self.steps,
        )

    def _pays(self, plan: Plan) -> bool:
        """Whether a plan wins its costs back: something in most windows, and far more than it loses."""
        least = _LEAST_GAIN * self.mean.mean
        won = plan.won_in_windows
        weight_won = sum(compress(self.weights, (seconds >= least for seconds in won)))
        gained = sum(weight * max(0.0, seconds) for weight, seconds in zip(self.weights, won, strict=True))
        lost = gained - plan.seconds_won
        in_windows = weight_won >= _MOST and lost <= _FEW * gained
        return in_windows and plan.seconds_won >= least and plan.net_seconds(self.rules.margin) > 0

    def _slowest(self, shares: Shares) -> list[float]:
        """Return the time of the slowest host in each window."""
        return [max(host_seconds(window, shares)) for window in self.windows]

    def _mean_imbalance(self, slowest: Sequence[float]) -> float:
        pairs = zip(slowest, self.windows, strict=True)
        return sum(map(mul, self.weights, (s / window.mean if window.mean else 1.0 for s, window in pairs)))
