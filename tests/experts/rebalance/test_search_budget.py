"""The work of a decision is bounded by a number, whatever the hosts, experts and layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from experts.placement.division import SearchBudget
from experts.placement.placement import HostFacts
from experts.rebalance.costs import Cluster, LayerCosts
from experts.rebalance.decisions import BalanceRules, decide, layer_imbalance
from experts.rebalance.load_history import LoadHistory
from experts.structure import Change, LayerStructure, changed

COSTS = LayerCosts(row_flops=1.0, state_bytes=1.0, gradient_bytes=0.1)
NUM_HOSTS = 16
NUM_EXPERTS = 64
CLUSTER = Cluster(tuple(HostFacts(1e4) for _ in range(NUM_HOSTS)), 1e6)
LAYER = LayerStructure.initial(
    "moe", [100] * NUM_EXPERTS, [expert % NUM_HOSTS for expert in range(NUM_EXPERTS)]
)


def uneven_loads(seed: int) -> list[int]:
    """Loads by Zipf's law, in an order of their own."""
    loads = [6400 // rank for rank in range(1, NUM_EXPERTS + 1)]
    random.Random(seed).shuffle(loads)
    return loads


def alternating(seed: int) -> LoadHistory:
    """Loads that go back and forth: copies must suit both, which takes the longest search."""
    history = LoadHistory()
    for window in range(6):
        history = history.observed(LAYER.ids, uneven_loads(2 * seed + window % 2), 1)
    return history


def decided(layers: Sequence[LayerStructure], max_search: float) -> tuple[Change, ...]:
    histories = [alternating(seed) for seed in range(len(layers))]
    rules = BalanceRules(max_search=max_search)
    return decide(layers, histories, [COSTS] * len(layers), CLUSTER, rules)


def imbalance_after(layers: Sequence[LayerStructure], changes: Sequence[Change], index: int) -> float:
    layer = layers[index]
    for change in changes:
        if change.layer == index:
            layer = changed(layer, change, 0)
    pair = [layer_imbalance(layer, uneven_loads(2 * index + window), COSTS, CLUSTER) for window in range(2)]
    return max(pair)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All that searches spend."""
    counts: list[int] = []
    spend = SearchBudget.spend

    def counted(budget: SearchBudget, count: int) -> None:
        counts.append(count)
        spend(budget, count)

    monkeypatch.setattr(SearchBudget, "spend", counted)
    return counts


@pytest.mark.parametrize("num_layers", [1, 5])
def test_a_decision_ends_when_its_budget_is_spent(spent: list[int], num_layers: int) -> None:
    layers = [replace(LAYER, name=f"moe{number}") for number in range(num_layers)]
    max_search = 2_500
    decided(layers, max_search)
    # Each search may end the round that it is in.
    assert sum(spent) <= 1.5 * max_search
    spent.clear()
    decided(layers, float("inf"))
    assert sum(spent) > 3 * max_search


def test_a_bounded_decision_improves_what_it_can() -> None:
    before = imbalance_after([LAYER], (), 0)
    bounded = imbalance_after([LAYER], decided([LAYER], 40_000), 0)
    assert bounded < 0.8 * before
    assert decided([LAYER], 40_000) == decided([LAYER], 40_000)


def test_a_part_of_a_budget_leaves_the_rest_to_the_others() -> None:
    budget = SearchBudget(90)
    budget.begin_part(1 / 3)
    budget.spend(29)
    assert not budget.is_spent
    budget.spend(1)
    assert budget.is_spent
    budget.begin_part(0.5)
    budget.spend(10)
    assert not budget.is_spent
    budget.begin_part(1)  # has what the part before has left
    budget.spend(49)
    assert not budget.is_spent
    budget.spend(1)
    assert budget.is_spent
