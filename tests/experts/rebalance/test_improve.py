"""Moves and copies of the search: balanced for one load and for several, within memory and copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from experts.placement.division import SearchBudget, Shares, imbalance
from experts.placement.placement import HostFacts
from experts.placement.problem import Problem
from experts.placement.search import SearchLimits, improve
from experts.rebalance.costs import Cluster, LayerCosts
from experts.rebalance.decisions import BalanceRules, decide, layer_imbalance
from experts.rebalance.load_history import LoadHistory
from experts.structure import LayerStructure, changed

AIM = 1.02


def zipf(count: int, seed: int, exponent: float = 1.5) -> tuple[float, ...]:
    work = [1000 / rank**exponent for rank in range(1, count + 1)]
    random.Random(seed).shuffle(work)
    return tuple(work)


def problem(work: Sequence[float], speeds: Sequence[float], memory: float = 1e9) -> Problem:
    ones = (1.0,) * len(work)
    zeros = (0.0,) * len(work)
    return Problem(work, ones, speeds, [memory] * len(speeds), zeros, zeros)


def round_robin(num_experts: int, num_hosts: int) -> Shares:
    return tuple(((expert % num_hosts, 1.0),) for expert in range(num_experts))


def improved(problems: Sequence[Problem], max_copies: int = 99) -> Shares:
    before = round_robin(len(problems[0].work), len(problems[0].speed))
    return improve(problems, before, SearchLimits(AIM, max_copies=max_copies), SearchBudget())


@pytest.mark.parametrize(("num_hosts", "num_experts"), [(2, 7), (3, 16), (16, 8), (64, 256)])
def test_one_load_is_balanced(num_hosts: int, num_experts: int) -> None:
    speeds = [1.0 + host % 2 for host in range(num_hosts)]
    given = problem(zipf(num_experts, 0), speeds)
    shares = improved([given])
    assert imbalance(given, shares) <= AIM + 1e-9
    assert all(sum(share for _, share in copies) == pytest.approx(1.0) for copies in shares)
    # Each copy fills a host, or is the last of its expert.
    assert sum(len(copies) - 1 for copies in shares) <= 2 * num_hosts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_hosts", "num_experts"), [(3, 16), (16, 64)])
def test_two_loads_are_nearly_balanced_by_the_same_shares(
    num_hosts: int, num_experts: int, seed: int
) -> None:
    pair = [problem(zipf(num_experts, 2 * seed + n), [1.0] * num_hosts) for n in range(2)]
    shares = improved(pair)
    before = round_robin(num_experts, num_hosts)
    assert min(imbalance(each, before) for each in pair) > 1.3
    assert max(imbalance(each, shares) for each in pair) <= 1.12


def test_an_even_load_stays_as_it_is() -> None:
    assert improved([problem([1.0] * 8, [1.0] * 4)]) == round_robin(8, 4)


def test_experts_without_work_stay_where_they_are() -> None:
    shares = improved([problem([8.0, 0.0, 0.0, 0.0], [1.0, 1.0])])
    assert [copies[0][0] for copies in shares[1:]] == [1, 0, 1]
    assert imbalance(problem([8.0, 0.0, 0.0, 0.0], [1.0, 1.0]), shares) == pytest.approx(1.0)


def test_a_whole_expert_is_moved_and_not_copied() -> None:
    """Host 0 has three experts and host 1 one: one move makes them even."""
    given = problem([1.0] * 4, [1.0, 1.0])
    before: Shares = (((0, 1.0),), ((0, 1.0),), ((0, 1.0),), ((1, 1.0),))
    shares = improve([given], before, SearchLimits(AIM, max_copies=99), SearchBudget())
    assert imbalance(given, shares) == 1.0
    assert all(len(copies) == 1 for copies in shares)


def test_memory_and_the_number_of_copies_limit_it() -> None:
    work = [100.0, 1.0, 1.0, 1.0]
    full = improved([problem(work, [1.0] * 4, memory=1.0)])
    assert full == round_robin(4, 4)
    at_most_two = improved([problem(work, [1.0] * 4)], max_copies=2)
    assert len(at_most_two[0]) == 2


def test_a_spent_budget_ends_it() -> None:
    given = problem(zipf(256, 0), [1.0] * 64)
    before = round_robin(256, 64)
    assert improve([given], before, SearchLimits(AIM, max_copies=99), SearchBudget(0)) == before


@pytest.mark.extended
def test_two_decisions_balance_many_layers_whose_loads_alternate() -> None:
    """Each layer has its part of the budget, and the second decision goes on where the first ended."""
    num_hosts = 64
    num_experts = 256
    costs = LayerCosts(row_flops=1.0, state_bytes=1.0, gradient_bytes=0.001)
    cluster = Cluster(tuple(HostFacts(1e4) for _ in range(num_hosts)), 1e9)
    hosts = [expert % num_hosts for expert in range(num_experts)]
    first = LayerStructure.initial("moe", [100] * num_experts, hosts)
    layers = [replace(first, name=f"moe{number}") for number in range(6)]
    loads = [[[round(w) for w in zipf(num_experts, 2 * n + k)] for k in range(2)] for n in range(6)]
    histories: list[LoadHistory] = []
    for pair in loads:
        history = LoadHistory()
        for window in range(6):
            history = history.observed(first.ids, pair[window % 2], 1)
        histories.append(history)
    for limit in (1.5, 1.05):
        for change in decide(layers, histories, [costs] * 6, cluster, BalanceRules()):
            layers[change.layer] = changed(layers[change.layer], change, 0)
        for layer, pair in zip(layers, loads, strict=True):
            assert max(layer_imbalance(layer, each, costs, cluster) for each in pair) <= limit
