"""When the balancer decides: soon after a change or a shift of the loads, seldom where nothing helps."""

from __future__ import annotations

import math

import pytest

from experts.kernels.adapters import Adapters
from experts.moe.layer import MoELayer
from experts.placement.placement import ExpertCost, HostFacts
from experts.rebalance.costs import Cluster, LayerCosts
from experts.structure import Change, LayerStructure
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.train.evolution import balancer as balancer_module
from orchestrator.train.evolution.balancer import FIRST_INTERVAL, HostBalancer, layer_costs

EVEN = [100, 100, 100, 100]
HOT = [400, 0, 0, 0]


def intervals(loads: list[list[int]], bandwidth: float) -> list[int]:
    """Return the steps after each decision. Experts stay where they are."""
    layers = [LayerStructure.initial("moe", [8] * 4, [0, 0, 1, 1])]
    costs = [LayerCosts(row_flops=48.0, state_bytes=128.0, gradient_bytes=32.0)]
    balancer = HostBalancer(costs, Cluster((HostFacts(1e10), HostFacts(1e10)), bandwidth))
    state = EvolutionState(balance_interval=FIRST_INTERVAL)
    found: list[int] = []
    for counts in loads:
        changes = balancer.decide(layers, [counts], state, steps_left=1000)
        state.balance_interval = balancer.next_interval(layers, state, bool(changes))
        found.append(state.balance_interval)
    return found


def test_the_interval_grows_while_the_hosts_are_even() -> None:
    assert intervals([EVEN] * 6, 1e9) == [10, 20, 40, 80, 80, 80]


def test_the_next_decision_is_soon_after_a_change() -> None:
    # The first window alone decides nothing.
    assert intervals([HOT] * 3, 1e9) == [5, 5, 5]


def test_the_next_decision_is_soon_after_the_loads_shift() -> None:
    assert intervals([*[EVEN] * 6, HOT], 1e3)[-2:] == [80, 5]


def test_hosts_that_nothing_helps_are_looked_at_less_and_less() -> None:
    # Nothing pays over such a link.
    assert intervals([HOT] * 10, 1.0) == [5] * 7 + [10, 20, 40]


def test_experts_move_only_where_the_rest_of_the_run_wins_their_costs() -> None:
    layers = [LayerStructure.initial("moe", [8] * 4, [0, 0, 1, 1])]
    costs = [LayerCosts(row_flops=48.0, state_bytes=128.0, gradient_bytes=32.0)]
    hosts = (HostFacts(1e6), HostFacts(1e6))
    balancer = HostBalancer(costs, Cluster(hosts, bandwidth=1e6, change_seconds=0.1))

    def moved(steps_left: float) -> list[str]:
        state = EvolutionState(balance_interval=FIRST_INTERVAL)
        uneven = [300, 300, 0, 0]
        balancer.decide(layers, [uneven], state, steps_left)
        return [change.reason for change in balancer.decide(layers, [uneven], state, steps_left)]

    assert "for about 100 steps" in moved(100)[0]
    assert "for about 500 steps" in moved(math.inf)[0], "the longest that a load is trusted to last"
    assert moved(1) == moved(0) == []


def test_a_newborn_expert_costs_what_its_own_layer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ExpertCost] = []
    monkeypatch.setattr(balancer_module, "cheapest_host", lambda _, __, newborn, *___: given.append(newborn))
    layers = [LayerStructure.initial(name, [8] * 4, [0, 0, 1, 1]) for name in ("first", "second")]
    costs = [LayerCosts(row_flops=flops, state_bytes=flops, gradient_bytes=flops) for flops in (48.0, 96.0)]
    balancer = HostBalancer(costs, Cluster((HostFacts(1e10), HostFacts(1e10)), 1e9))
    birth = Change("born", 1, (4,), "a test", parents=(2,), size=8)
    assert balancer.newborn_host(layers, birth, EvolutionState()) == 1, "the host of its parent"
    assert given == [costs[1].expert(8, 1.0)]


def test_an_expert_has_three_matrices_with_the_state_of_their_optimizer() -> None:
    layer = MoELayer(8, [4, 4], 1)
    costs = layer_costs(layer, state_bytes=20)
    assert (costs.row_flops, costs.state_bytes, costs.gradient_bytes) == (6 * 24, 20 * 24, 4 * 24)


def test_copies_of_frozen_experts_send_the_gradients_of_their_adapters_alone() -> None:
    """Rank 2: (8 + 8) × 2 beside the first matrix, with the gate, and (4 + 8) × 2 beside the second."""
    layer = MoELayer(8, [4, 4], 1)
    layer.bank.adapt(Adapters(2, 1.0))
    assert layer_costs(layer, state_bytes=2).gradient_bytes == 4 * (32 + 24) / 4
