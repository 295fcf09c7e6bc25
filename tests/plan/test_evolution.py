"""Whether experts change during training, the memory for their growth, and their copies."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from experts.copy_costs import held_bytes
from harness.fakes.inventories import gpu, machine, model, planned
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelSharding, estimate_memory
from orchestrator.plan.evolution import change_memory, grown, unused_thresholds
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.pass_memory import PassMemory
from orchestrator.plan.planning import Plan
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.types import GIB

CPU = machine()
ONE = machine(gpu())
TWO = machine(gpu(), gpu(1))
FOUR = machine(*(gpu(index) for index in range(4)))
DENSE = model(experts=0, expert_parameters=0, gate_parameters=0, moe_layers=0)
# 8 experts in each of 4 layers, with a few large ones
LAYERS = ((10_000,) * 8, (20_000,) * 7 + (40_000,), (10_000,) * 8, (12_500,) * 8)
FACTS = model(expert_parameters=sum(map(sum, LAYERS)), expert_weights=LAYERS)
# 14 GiB of state, most of it in experts
LARGE = model(parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8, gate_parameters=8 * 10**4)


def hosted(inventory: Inventory = CPU, **given: Any) -> Plan:
    return planned(inventory, FACTS, parallel_strategy="expert_parallel", workers=4, **given)


# --- the preset


def test_experts_stay_as_they_are_by_default() -> None:
    for task in ("text", "synthetic", "my.module:Task"):
        plan = planned(CPU, FACTS, task=task)
        assert plan.evolution.value == "off"
        assert "--evolution cautious" in plan.evolution.reason
        assert plan.evolution_rules is None


def test_the_digits_show_evolution() -> None:
    plan = planned(CPU, FACTS, task="digits")
    assert plan.evolution.value == "bold"
    assert plan.evolution.reason.startswith("the task digits shows it: 2 to 16 experts per layer")
    assert planned(CPU, FACTS, task="text").evolution.value == "off"
    assert planned(CPU, FACTS, task="digits", evolution="off").evolution.value == "off"
    assert planned(CPU, FACTS, task="digits", auto=False).evolution.reason == NO_AUTO
    assert planned(CPU, DENSE, task="digits").evolution.value == "off"
    sharded = planned(TWO, FACTS, task="digits", sharding="zero3")
    assert sharded.evolution.value == "off"
    assert sharded.evolution.reason == "sharding zero3 divides the weights of experts"
    on_hosts = planned(TWO, FACTS, task="digits", sharding="zero3", parallel_strategy="expert_parallel")
    assert (on_hosts.evolution.value, on_hosts.sharding.value) == ("bold", "zero3")
    coded = planned(CPU, FACTS, task="digits", optimizer="adamw8bit")
    assert coded.evolution.value == "bold"
    hosts = {"parallel_strategy": "expert_parallel", "workers": 2, "expert_replicas": 2}
    grouped = planned(TWO, FACTS, task="digits", **hosts)
    assert grouped.evolution.value == "off"
    assert grouped.evolution.reason == "--expert-replicas keeps every expert in each group"


def test_the_flag_decides_and_the_rules_are_in_the_plan() -> None:
    plan = planned(CPU, FACTS, evolution="cautious", min_experts=3, prune_below=0.5, sleep_every=40)
    assert plan.evolution.value == "cautious"
    reason = "set by --evolution cautious: 3 to 12 experts per layer, 8 at the start; judged every 40 steps"
    assert plan.evolution.reason.startswith(reason)
    rules = plan.evolution_rules
    assert rules is not None
    assert (rules.min_experts, rules.max_experts, rules.prune_below) == (3, 12, 0.5)
    assert plan.to_json()["evolution_rules"] == asdict(rules)
    assert planned(CPU, FACTS).to_json()["evolution_rules"] is None


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="--evolution bold changes the experts of a model, and this"):
        planned(CPU, DENSE, evolution="bold")
    assert planned(CPU, DENSE).evolution.reason == "not used: the model has no experts"


@pytest.mark.parametrize(("name", "value"), [("max_experts", 7), ("min_experts", 9)])
def test_limits_that_exclude_the_models_experts_are_refused(name: str, value: int) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(UserError, match=rf"{name} is {value}, but a layer begins with 8 experts"):
        planned(CPU, FACTS, evolution="bold", **given)


# --- memory for growth


def test_new_experts_count_as_large_as_the_largest_of_their_layer() -> None:
    facts = grown(FACTS, 10)
    added = 2 * (10_000 + 40_000 + 10_000 + 12_500)
    assert facts.expert_parameters == FACTS.expert_parameters + added
    assert facts.gate_parameters == FACTS.gate_parameters * 10 / 8
    assert facts.parameters == FACTS.parameters + added + 250
    assert facts.trainable == FACTS.trainable + added + 250
    assert facts.experts == 10
    assert grown(FACTS, 8) == grown(FACTS, 3) == FACTS


def test_without_the_weights_of_each_expert_growth_is_in_proportion() -> None:
    facts = grown(model(), 12)
    assert facts.expert_parameters == 900_000
    assert facts.gate_parameters == 1_500
    assert facts.parameters == 1_000_000 + 300_000 + 500


def test_the_plan_keeps_memory_for_growth() -> None:
    still = planned(ONE, FACTS)
    growing = planned(ONE, FACTS, evolution="bold", max_experts=11)
    expected = estimate_memory(
        grown(FACTS, 11),
        growing.batch_size.value,
        growing.activation_checkpointing.value,
        growing.memory.limit,
    )
    assert growing.memory == expected
    # Four bytes each of the weight, its gradient and two moments.
    added = 3 * (10_000 + 40_000 + 10_000 + 12_500) * 16
    state = growing.memory.parameters + growing.memory.gradients + growing.memory.optimizer
    assert state - (still.memory.parameters + still.memory.gradients + still.memory.optimizer) == added
    assert growing.evolution.reason.endswith(" are kept for new ones")
    assert "3.3 MiB" in growing.evolution.reason


def test_the_most_experts_are_lowered_to_what_fits() -> None:
    # The state takes 14.9 GiB; with 12 experts 21.6 GiB.
    tight = machine(gpu(total=20 * GIB))
    # In a model of very many layers, the change of one needs less than the activations of a sample.
    many_layers = replace(LARGE, moe_layers=10**5)
    plan = planned(tight, many_layers, evolution="cautious", gpu_memory_fraction=1.0)
    assert plan.evolution_rules is not None
    most = plan.evolution_rules.max_experts
    assert 8 < most < 12
    assert "8 at the start; memory does not allow 12" in plan.evolution.reason
    assert plan.memory.fits
    limit = plan.memory.limit
    one_more = estimate_memory(grown(many_layers, most + 1), 1, True, limit)
    assert not one_more.fits
    roomy = planned(ONE, LARGE, evolution="cautious").evolution_rules
    assert roomy is not None
    assert roomy.max_experts == 12


def test_the_experts_of_a_layer_fit_twice_during_a_change() -> None:
    # The state of 8 experts takes 14.9 GiB, of which a layer has 3.4 GiB: 12 experts would need 26.7 GiB.
    tight = machine(gpu(total=22 * GIB))
    plan = planned(tight, LARGE, evolution="cautious", gpu_memory_fraction=1.0)
    assert plan.evolution_rules is not None
    assert plan.evolution_rules.max_experts == 9
    limit = plan.memory.limit
    assert limit is not None
    assert estimate_memory(grown(LARGE, 10), 1, True, limit).fits, "a step alone would fit"
    config = Config.of()
    sharding = ModelSharding()
    state = 16 * (10**9 + round(9 * 10**8 / 8)) + 16 * 9 * 10**4
    layer = 16 * (9 * 10**8 * 9 // 8) // 4
    change_bytes = change_memory(config, grown(LARGE, 9), sharding)
    assert change_bytes == pytest.approx(state + layer, rel=1e-3)
    assert change_bytes <= limit < change_memory(config, grown(LARGE, 10), sharding)


def test_a_host_needs_memory_for_its_own_experts_of_a_changing_layer() -> None:
    config = Config.of()
    whole = change_memory(config, FACTS, ModelSharding())
    hosts = change_memory(config, FACTS, ModelSharding(workers=4, form="experts"))
    layer = 8 * 40_000 * 16  # all experts counted as the largest
    dense = 16 * (FACTS.parameters - FACTS.expert_parameters)
    assert whole == pytest.approx(16 * FACTS.parameters + layer, rel=1e-6)
    assert hosts == pytest.approx(dense + (16 * FACTS.expert_parameters + layer) / 4, rel=1e-6)


def test_a_huge_limit_is_searched_quickly() -> None:
    plan = planned(ONE, FACTS, evolution="bold", max_experts=10**15)
    assert plan.evolution_rules is not None
    assert plan.evolution_rules.max_experts > 1000
    assert plan.memory.fits


def test_growth_decides_about_divided_experts_and_forbids_sharding() -> None:
    tight = machine(gpu(total=20 * GIB), gpu(1, total=20 * GIB))
    whole = planned(tight, LARGE, gpu_memory_fraction=1.0)
    assert (whole.strategy.value, whole.sharding.value) == ("data_parallel", "none")
    growing = planned(tight, LARGE, gpu_memory_fraction=1.0, evolution="cautious")
    assert growing.strategy.value == "expert_parallel"
    assert growing.evolution_rules is not None
    assert growing.evolution_rules.max_experts == 12
    dense = replace(LARGE, parameters=2 * 10**9, trainable=2 * 10**9)
    assert planned(tight, dense, parallel_strategy="data_parallel").sharding.value != "none"
    kept = planned(tight, dense, parallel_strategy="data_parallel", evolution="bold").sharding
    assert (kept.value, kept.reason) == ("none", "evolution changes whole experts")


# --- copies and moves


def test_each_group_holds_every_expert() -> None:
    assert hosted().expert_replicas.value == 1
    plan = hosted(expert_replicas=2)
    assert plan.expert_replicas.value == 2
    one = estimate_memory(FACTS, 1, False, None, ModelSharding(2, "experts"))
    grouped = estimate_memory(FACTS, 1, False, None, ModelSharding(4, "experts", expert_replicas=2))
    assert grouped == one
    assert plan.memory.parameters == one.parameters
    bare = replace(FACTS, passes=PassMemory())
    copied = estimate_memory(
        bare, 1, False, None, ModelSharding(4, "experts", expert_replicas=2, copies=True)
    )
    experts_of_a_host = 4 * bare.trained_experts // 2
    dense = 4 * (bare.trainable - bare.trained_experts)
    assert copied.activations == max(dense, held_bytes(experts_of_a_host)), "to sum the gradients"
    with pytest.raises(UserError, match="--expert-replicas 3 makes groups of equal size, and 4 hosts"):
        planned(FOUR, FACTS, parallel_strategy="expert_parallel", expert_replicas=3)
    single = planned(CPU, FACTS, expert_replicas=2).expert_replicas
    assert single.value == 1
    assert single.reason.endswith("instead of --expert-replicas 2")


def test_experts_move_where_evolution_is_on() -> None:
    assert not hosted().rebalance.value
    assert hosted(evolution="bold").rebalance.value
    assert hosted(rebalance="on").rebalance.value
    assert not hosted(evolution="bold", rebalance="off").rebalance.value
    with pytest.raises(UserError, match="in one group alone"):
        hosted(evolution="bold", expert_replicas=2)
    assert hosted(evolution="bold", auto=False).rebalance.reason == NO_AUTO
    one_host = planned(CPU, FACTS, parallel_strategy="expert_parallel", workers=1, rebalance="on")
    assert one_host.rebalance.reason == "one host has all experts"
    single = planned(CPU, FACTS, rebalance="on").rebalance
    assert not single.value
    assert single.reason.endswith("instead of --rebalance on")


def test_thresholds_without_effect_are_named() -> None:
    assert unused_thresholds(Config.of(evolution="bold", max_experts=9), "bold") is None
    assert unused_thresholds(Config.of(rebalance="on"), "off") is None
    message = unused_thresholds(Config.of(max_experts=9, prune_below=0.1), "off")
    assert message == (
        "--max-experts 9, --prune-below 0.1 are not used: evolution is off; add --evolution cautious or bold"
    )
    message = unused_thresholds(Config.of(sleep_every=9), "off")
    assert message is not None
    assert message.startswith("--sleep-every 9 is not used")
