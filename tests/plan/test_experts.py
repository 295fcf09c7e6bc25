"""Whether experts are shared out among hosts, who runs the gate, how tokens travel, and what computes the experts."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, ShardingForm, estimate_memory
from orchestrator.plan.experts import choose_chunks, choose_kernel, settle_strategy, unused_settings
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.plan.workers import PLAIN
from orchestrator.types import GIB, Choice, StrategyName
from tests.support.inventories import cluster, gpu, machine, model

CPU, ONE, TWO = machine(), machine(gpu()), machine(gpu(), gpu(1))
EXPERTS = model(
    parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8, gate_parameters=10**4
)  # 16 GB of state, most in experts
DENSE = model(experts=0, expert_parameters=0, gate_parameters=0, moe_layers=0)
FOUND: Choice[StrategyName] = Choice("data_parallel", "4 GPUs were found: one worker for each")


def need(form: ShardingForm, facts: ModelFacts = EXPERTS, workers: int = 4) -> float:
    """Of one sample, its activations recomputed: the least that a form can do with."""
    return min(
        estimate_memory(facts, 1, recompute, None, ModelSharding(workers, form)).total
        for recompute in (False, True)
    )


def settled(
    limit: float, facts: ModelFacts = EXPERTS, workers: int = 4, on_gpu: bool = True, **given: Any
) -> Choice[StrategyName]:
    return settle_strategy(Config.of(**given), facts, FOUND, workers, limit, on_gpu)


def planned(
    inventory: Inventory, facts: ModelFacts | None = None, where: Cluster | None = None, **given: Any
) -> Plan:
    return plan(Config.of(**given), inventory, facts or model(), cluster=where)


def hosted(inventory: Inventory = CPU, facts: ModelFacts | None = None, **given: Any) -> Plan:
    return planned(inventory, facts, parallel_strategy="expert_parallel", **given)


# --- strategy, once the model is known


def test_experts_are_shared_out_where_whole_copies_do_not_fit_even_recomputed():
    assert settled(need("none")).value == "data_parallel"
    found = settled(need("none") - 1)
    assert found.value == "expert_parallel"
    assert found.reason.startswith(
        "4 GPUs were found: one worker for each; with the experts shared out one sample needs "
    )
    assert found.rejected[0].option == "data_parallel"
    assert "14.9 GiB" in found.rejected[0].why


def test_what_fits_is_not_shared_out_and_the_plan_says_why():
    found = settled(80.0 * GIB)
    assert (found.value, found.reason) == (FOUND.value, FOUND.reason)
    assert found.rejected[-1].option == "expert_parallel"
    assert "whole copies fit" in found.rejected[-1].why


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"auto": False}, "--no-auto"),
        ({"sharding": "zero3"}, "sharding zero3 works with data_parallel only"),
        ({"cpu_offload": True}, "cpu_offload works with data_parallel only"),
        ({"sync_batchnorm": True}, "sync_batchnorm works with data_parallel only"),
        ({"static_graph": True}, "static_graph works with data_parallel only"),
        ({"find_unused_parameters": True}, "find_unused_parameters works with data_parallel only"),
        ({"batch_size": "auto"}, "batch_size auto works with data_parallel only"),
    ],
)
def test_what_works_with_whole_models_only_keeps_them_whole(given: dict[str, Any], words: str):
    found = settled(need("none") - 1, **given)
    assert found.value == "data_parallel"
    assert words in found.rejected[-1].why


def test_a_dense_model_and_one_worker_share_nothing_out():
    assert "no experts" in settled(1.0, DENSE).rejected[-1].why
    assert "one worker" in settled(1.0, workers=1).rejected[-1].why


def test_where_the_dense_part_is_what_does_not_fit_sharding_is_taken():
    heavy = model(parameters=10**9, trainable=10**9, expert_parameters=10**8)
    limit = need("zero3", heavy)
    assert need("experts", heavy) > limit
    found = settled(limit, heavy)
    assert found.value == "data_parallel"
    assert "outside the experts" in found.rejected[-1].why
    assert settled(limit, heavy, on_gpu=False).value == "expert_parallel", (
        "on CPUs nothing is sharded by itself"
    )
    assert settled(limit, heavy, sharding="none").value == "expert_parallel", "nor where that is refused"


def test_where_nothing_fits_the_least_is_taken():
    assert need("experts") < need("zero3")
    assert settled(1.0).value == "expert_parallel"


def test_what_is_asked_for_by_name_stays():
    for asked in ("data_parallel", "expert_parallel"):
        found: Choice[StrategyName] = Choice(asked, "asked for")
        assert settle_strategy(Config.of(parallel_strategy=asked), EXPERTS, found, 4, 1.0, True) is found
        assert settle_strategy(Config.of(parallel_strategy=asked), EXPERTS, found, 4, 1e12, True) is found


def test_a_dense_model_under_expert_parallel_is_told_what_to_do():
    for inventory in (CPU, TWO):
        with pytest.raises(
            UserError,
            match=r"this one has none: all of its 1\.0M parameters are dense\. Use .*data_parallel, or .*--experts N",
        ):
            hosted(inventory, DENSE)


def test_the_whole_plan_shares_experts_out_by_itself():
    four = machine(*(gpu(index, total=12 * GIB) for index in range(4)))
    found = planned(four, EXPERTS)
    assert (found.strategy.value, found.workers.value, found.sharding.value, found.backend.value) == (
        "expert_parallel",
        4,
        "none",
        "nccl",
    )
    assert "whole on each" in found.sharding.reason
    assert found.memory.fits
    assert found.memory == estimate_memory(
        EXPERTS,
        found.batch_size.value,
        found.activation_checkpointing.value,
        found.memory.limit,
        ModelSharding(4, "experts"),
    )
    assert planned(four, EXPERTS, parallel_strategy="data_parallel").sharding.value != "none"
    assert planned(four).strategy.value == "data_parallel"


def test_in_a_cluster_the_node_of_a_worker_sets_the_limit():
    small = machine(gpu(total=12 * GIB))
    assert planned(small, EXPERTS, cluster(1, 1, 1, 1)).strategy.value == "expert_parallel"
    assert planned(ONE, EXPERTS, cluster(1, 1, 1, 1)).strategy.value == "data_parallel"


def test_one_host_is_allowed():
    found = hosted(workers=1)
    assert (found.strategy.value, found.workers.value, found.backend.value, found.data_ranks) == (
        "expert_parallel",
        1,
        "gloo",
        1,
    )
    assert found.memory == planned(CPU, batch_size=found.batch_size.value).memory


def test_more_hosts_than_experts_are_allowed():
    assert hosted(workers=4, facts=model(experts=2)).workers.value == 4


# --- gate and batch


def test_the_gate_is_everywhere_unless_asked_for():
    found = hosted(workers=2, batch_size=32)
    assert (found.gate.value, found.data_ranks, found.global_batch_size.value) == ("replicated", 2, 64)
    assert found.gate.rejected[0].option == "primary"
    primary = hosted(workers=2, batch_size=32, gate="primary")
    assert (primary.gate.value, primary.data_ranks, primary.global_batch_size.value) == ("primary", 1, 32)
    assert "asked for by --gate primary" in primary.gate.reason
    assert primary.flops_per_step * 2 == found.flops_per_step


@pytest.mark.parametrize(
    ("inventory", "facts", "words"),
    [
        (CPU, None, "one process has all experts"),
        (TWO, None, "every worker has all experts"),
        (CPU, DENSE, "the model has no experts"),
    ],
)
def test_elsewhere_the_settings_of_expert_parallel_are_not_used(
    inventory: Inventory, facts: ModelFacts | None, words: str
):
    found = planned(inventory, facts)
    assert (found.gate.value, found.placement.value, found.exchange_chunks.value) == ("replicated", "none", 1)
    for choice in (found.gate, found.placement, found.exchange_chunks):
        assert choice.reason == f"not used: {words}"
    asked = planned(inventory, facts, gate="primary", placement="x.json", exchange_chunks=3)
    assert (asked.gate.value, asked.placement.value, asked.exchange_chunks.value) == ("replicated", "none", 1)
    assert asked.gate.reason.endswith(", in place of --gate primary")
    assert asked.placement.reason.endswith(", in place of --placement x.json")
    assert asked.exchange_chunks.reason.endswith(", in place of --exchange-chunks 3")
    assert asked.data_ranks == asked.workers.value


# --- placement


def test_placement_is_by_cost_and_speed_unless_asked_for():
    assert hosted(workers=2).placement.value == "auto"
    assert hosted(workers=2).placement.rejected[0].option == "round_robin"
    for asked in ("round_robin", "/x/y.json"):
        assert hosted(workers=2, placement=asked).placement == Choice(
            asked, f"asked for by --placement {asked}"
        )
    assert hosted(workers=1).placement.reason == "one host has all experts"
    assert hosted(workers=2, auto=False).placement == Choice("round_robin", PLAIN)


# --- chunks


def chunks(
    tokens: int = 8192,
    workers: int = 4,
    backend: str = "nccl",
    on_gpu: bool = True,
    unused: str | None = None,
    **given: Any,
) -> Choice[int]:
    return choose_chunks(Config.of(**given), unused, workers, backend, on_gpu, tokens)


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (chunks(), 2, "8192 tokens"),
        (chunks(4096), 2, "4096 tokens"),
        (chunks(4095), 1, "too few"),
        (chunks(backend="gloo"), 1, "gloo"),
        (chunks(backend="gloo", on_gpu=False), 1, "same cores"),
        (chunks(workers=1), 1, "one host"),
        (chunks(auto=False), 1, "--no-auto"),
        (chunks(16, on_gpu=False, exchange_chunks=3), 3, "asked for by --exchange-chunks 3"),
        (chunks(unused="not used: x"), 1, "not used: x"),
    ],
)
def test_tokens_travel_in_parts_where_something_can_hide_them(found: Choice[int], expected: int, words: str):
    assert found.value == expected
    assert words in found.reason


def test_the_plan_counts_the_tokens_of_a_host():
    text = model(units_per_sample=128)
    assert hosted(TWO, text, batch_size=32).exchange_chunks.value == 2
    assert hosted(TWO, text, batch_size=31).exchange_chunks.value == 1
    assert hosted(TWO, text, batch_size=64, gate="primary").exchange_chunks.value == 2
    assert hosted(TWO, text, batch_size=63, gate="primary").exchange_chunks.value == 1
    assert hosted(TWO, text, batch_size=64, backend="gloo").exchange_chunks.value == 1


# --- kernel


@pytest.mark.parametrize(
    ("capability", "precision", "expected"),
    [
        (None, "fp32", "auto"),
        (None, "bf16", "auto"),
        ((8, 0), "bf16", "loop"),
        ((8, 9), "bf16", "loop"),
        ((9, 0), "bf16", "grouped"),
        ((10, 0), "bf16", "grouped"),
        ((9, 0), "fp32", "loop"),
        ((9, 0), "fp16", "loop"),
    ],
)
def test_grouped_products_where_they_are_fused(
    capability: tuple[int, int] | None, precision: str, expected: str
):
    assert choose_kernel(Config(), model(), precision, capability).value == expected
    for asked in ("loop", "grouped"):
        found = choose_kernel(Config.of(expert_kernel=asked), model(), precision, capability)
        assert found.value == asked
        assert ("not fused" in found.reason) == (asked == "grouped" and expected != "grouped")


def test_the_kernel_is_planned_under_every_strategy():
    assert (
        planned(ONE).expert_kernel.value
        == planned(TWO).expert_kernel.value
        == hosted(TWO).expert_kernel.value
        == "grouped"
    )
    assert planned(ONE, precision="fp32").expert_kernel.value == "loop"
    assert planned(CPU).expert_kernel.value == "auto"
    assert planned(ONE, auto=False).expert_kernel == Choice("loop", PLAIN)
    assert planned(ONE, DENSE).expert_kernel.reason == "not used: the model has no experts"


def test_the_new_choices_are_in_the_json():
    found = hosted(workers=2).to_json()["choices"]
    assert {
        name: found[name]["value"] for name in ("gate", "placement", "exchange_chunks", "expert_kernel")
    } == {
        "gate": "replicated",
        "placement": "auto",
        "exchange_chunks": 1,
        "expert_kernel": "auto",
    }


# --- settings that mean nothing


def test_settings_between_hosts_are_told_where_there_are_none():
    given = Config.of(gate="primary", placement="round_robin", exchange_chunks=4)
    told = unused_settings(given, "single", model())
    assert told is not None
    assert told.startswith(
        "--gate primary, --placement round_robin, --exchange-chunks 4 are not used: one process has all experts; "
    )
    assert "--parallel-strategy expert_parallel" in told
    one = unused_settings(Config.of(exchange_chunks=4), "data_parallel", model())
    assert one is not None
    assert one.startswith("--exchange-chunks 4 is not used: every worker has all experts")
    assert unused_settings(
        given, "single", DENSE
    ) == "--gate primary, --placement round_robin, --exchange-chunks 4 are not used: " + (
        "the model has no experts"
    )


def test_nothing_is_told_where_they_are_used_or_not_given():
    assert unused_settings(Config.of(gate="primary"), "expert_parallel", model()) is None
    assert unused_settings(Config.of(), "single", model()) is None
