"""Choices for models with experts: expert parallelism, gate, placement, token exchange, kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.fakes.inventories import cluster, gpu, machine, model, planned
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, ShardingForm, estimate_memory
from orchestrator.plan.experts import choose_chunks, choose_kernel, settle_strategy, unused_settings
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import Plan
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.strategies import DATA_PARALLEL, EXPERT_PARALLEL, LIVE_DATA_PARALLEL, SINGLE, StrategyName
from orchestrator.types import GIB, Choice, bytes_text

CPU = machine()
ONE = machine(gpu())
TWO = machine(gpu(), gpu(1))
# 16 GB of state, most of it in experts
EXPERTS = model(parameters=10**9, trainable=10**9, expert_parameters=9 * 10**8, gate_parameters=10**4)
DENSE = model(experts=0, expert_parameters=0, gate_parameters=0, moe_layers=0)
FOUND: Choice[StrategyName] = Choice("data_parallel", "4 GPUs were found, one for each worker")


def needed_bytes(form: ShardingForm, facts: ModelFacts = EXPERTS, workers: int = 4) -> float:
    """The least bytes that one sample needs under a form of sharding, recomputation included."""
    return min(
        estimate_memory(facts, 1, recompute, None, ModelSharding(workers, form)).total
        for recompute in (False, True)
    )


def settled(
    limit_bytes: float, facts: ModelFacts = EXPERTS, workers: int = 4, on_gpu: bool = True, **given: Any
) -> Choice[StrategyName]:
    return settle_strategy(Config.of(**given), facts, FOUND, workers, limit_bytes, on_gpu)


def hosted(inventory: Inventory = CPU, facts: ModelFacts | None = None, **given: Any) -> Plan:
    return planned(inventory, facts, parallel_strategy="expert_parallel", **given)


# --- strategy, once the model is known


def test_experts_are_divided_if_a_recomputed_replica_does_not_fit():
    assert settled(needed_bytes("none")).value == "data_parallel"
    chosen = settled(needed_bytes("none") - 1)
    assert chosen.value == "expert_parallel"
    assert chosen.reason.startswith(
        "4 GPUs were found, one for each worker; with divided experts one sample needs "
    )
    assert chosen.rejected[0].option == "data_parallel"
    assert "14.9 GiB" in chosen.rejected[0].why


def test_the_reason_has_the_memory_that_one_sample_needs_in_the_plan():
    """With a whole dense part on every host, if that fits."""
    limit_bytes = needed_bytes("none") - 1
    divided = estimate_memory(EXPERTS, 1, False, limit_bytes, ModelSharding(4, "experts"))
    assert divided.fits
    chosen = settled(limit_bytes)
    assert f"one sample needs {bytes_text(divided.total)} of the usable" in chosen.reason
    assert "with a copy on every worker one sample would need" in chosen.rejected[0].why


LIMITED = replace(EXPERTS, limits_capacity=True)


def test_experts_with_a_capacity_are_divided_even_if_a_replica_fits():
    """Data-parallel workers would each count their own tokens."""
    chosen = settled(needed_bytes("none"), LIMITED)
    assert chosen.value == "expert_parallel"
    assert chosen.reason.endswith("a capacity of experts counts the tokens of all workers")
    assert chosen.rejected[0].option == "data_parallel"
    assert settled(needed_bytes("none"), LIMITED, workers=1).value == "data_parallel"


@pytest.mark.parametrize(
    ("given", "needed_by"),
    [
        ({"parallel_strategy": "data_parallel"}, "data-parallel: "),
        ({"auto": False}, "data-parallel: "),
        ({"sync_batchnorm": True}, "data-parallel, which sync_batchnorm needs: "),
        ({"sharding": "zero3"}, "data-parallel, which sharding zero3 needs: "),
    ],
    ids=str,
)
def test_a_capacity_is_refused_on_data_parallel_workers(given: dict[str, Any], needed_by: str):
    with pytest.raises(UserError, match="Use --parallel-strategy expert_parallel or --workers 1") as caught:
        settled(needed_bytes("none"), LIMITED, **given)
    assert needed_by in str(caught.value)


def test_experts_of_a_model_that_fits_are_not_divided_and_the_reason_says_why():
    chosen = settled(80.0 * GIB)
    assert (chosen.value, chosen.reason) == (FOUND.value, FOUND.reason)
    assert chosen.rejected[-1].option == "expert_parallel"
    assert "a copy on every worker fits" in chosen.rejected[-1].why


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"auto": False}, "--no-auto"),
        ({"sharding": "zero3"}, "sharding zero3 works with data_parallel only"),
        ({"cpu_offload": True}, "cpu_offload works with data_parallel only"),
        ({"sync_batchnorm": True}, "sync_batchnorm works with data_parallel only"),
        ({"static_graph": True}, "static_graph works with data_parallel only"),
        ({"find_unused_parameters": True}, "find_unused_parameters works with data_parallel only"),
    ],
)
def test_settings_of_data_parallelism_rule_out_expert_parallelism(given: dict[str, Any], words: str):
    chosen = settled(needed_bytes("none") - 1, **given)
    assert chosen.value == "data_parallel"
    assert words in chosen.rejected[-1].why


def test_a_dense_model_and_one_worker_divide_nothing():
    assert "no experts" in settled(1.0, DENSE).rejected[-1].why
    assert "one worker" in settled(1.0, workers=1).rejected[-1].why


def test_sharding_is_chosen_if_the_dense_part_does_not_fit():
    """Experts are divided and the dense part is sharded; a task's own optimizer may refuse such a mixture."""
    sizes: dict[str, Any] = {"parameters": 10**9, "trainable": 10**9, "expert_parameters": 5 * 10**8}
    heavy = model(**sizes, own_optimizer=True)
    limit_bytes = needed_bytes("zero3", heavy)
    assert needed_bytes("experts", heavy) > limit_bytes
    assert settled(limit_bytes, model(**sizes)).value == "expert_parallel"
    chosen = settled(limit_bytes, heavy)
    assert chosen.value == "data_parallel"
    assert "outside the experts" in chosen.rejected[-1].why
    assert settled(limit_bytes, heavy, on_gpu=False).value == "expert_parallel", (
        "the plan does not shard on CPUs by itself"
    )
    assert settled(limit_bytes, heavy, sharding="none").value == "expert_parallel", (
        "nor against --sharding none"
    )


def test_the_strategy_that_needs_least_is_chosen_if_nothing_fits():
    assert needed_bytes("experts") < needed_bytes("zero3")
    assert settled(1.0).value == "expert_parallel"


def test_a_strategy_set_by_its_flag_stays():
    for strategy in ("data_parallel", "expert_parallel"):
        given: Choice[StrategyName] = Choice(strategy, "a flag")
        config = Config.of(parallel_strategy=strategy)
        assert settle_strategy(config, EXPERTS, given, 4, 1.0, True) is given
        assert settle_strategy(config, EXPERTS, given, 4, 1e12, True) is given


def test_expert_parallelism_of_a_dense_model_is_refused_with_advice():
    for inventory in (CPU, TWO):
        with pytest.raises(
            UserError,
            match=r"this model has none: all of its 1\.0M parameters are dense\. Use .*data_parallel, or .*--experts N",  # noqa: E501
        ):
            hosted(inventory, DENSE)


# --- live recovery


@pytest.mark.parametrize("given", [{}, {"parallel_strategy": "data_parallel"}])
def test_live_recovery_of_a_dense_model_needs_hosts_with_snapshots_and_spares(given: dict[str, Any]):
    four = machine(*map(gpu, range(4)))
    chosen = planned(four, DENSE, recovery="live", spares=1, sharding="zero2", **given)
    flags = "--parallel-strategy data_parallel --recovery live" if given else "--recovery live"
    assert (chosen.strategy.value, chosen.strategy.reason) == ("live_data_parallel", f"set by {flags}")
    assert (chosen.workers.value, chosen.sharding.value, chosen.snapshots.value) == (3, "zero2", "on")
    assert chosen.gate.reason == "not used: the model has no experts"
    restarted = planned(four, DENSE, recovery="restart")
    assert restarted.strategy.value == "data_parallel"
    assert restarted.snapshots.reason == "not used: after a loss all workers restart from a checkpoint"


def test_live_recovery_divides_experts_where_it_may():
    chosen = planned(TWO, model(), recovery="live")
    assert chosen.strategy.value == "expert_parallel"
    assert chosen.strategy.reason == "set by --recovery live; hosts of experts recover live"
    refused: list[dict[str, Any]] = [
        {"parallel_strategy": "data_parallel"},
        {"auto": False},
        {"sharding": "zero2"},
    ]
    for given in refused:
        with pytest.raises(
            UserError,
            match=r"model has experts; .* --parallel-strategy expert_parallel, or --recovery restart",
        ):
            planned(TWO, model(), recovery="live", **given)


def test_the_plan_divides_experts_by_itself():
    four = machine(*(gpu(index, total=12 * GIB) for index in range(4)))
    chosen = planned(four, EXPERTS)
    assert (chosen.strategy.value, chosen.workers.value, chosen.sharding.value, chosen.backend.value) == (
        "expert_parallel",
        4,
        "none",
        "nccl",
    )
    assert "whole on each" in chosen.sharding.reason
    assert chosen.memory.fits
    assert chosen.memory == estimate_memory(
        EXPERTS,
        chosen.batch_size.value,
        chosen.activation_checkpointing.value,
        chosen.memory.limit,
        ModelSharding(4, "experts"),
        chosen.accumulation_steps.value == 1,
    )
    assert planned(four, EXPERTS, parallel_strategy="data_parallel").sharding.value != "none"
    assert planned(four).strategy.value == "data_parallel"


def test_the_node_of_a_worker_limits_the_memory_in_a_cluster():
    small = machine(gpu(total=12 * GIB))
    assert planned(small, EXPERTS, cluster(1, 1, 1, 1)).strategy.value == "expert_parallel"
    assert planned(ONE, EXPERTS, cluster(1, 1, 1, 1)).strategy.value == "data_parallel"


def test_one_host_is_allowed():
    chosen = hosted(workers=1)
    assert (chosen.strategy.value, chosen.workers.value, chosen.backend.value, chosen.data_ranks) == (
        "expert_parallel",
        1,
        "gloo",
        1,
    )
    assert chosen.memory == planned(CPU, batch_size=chosen.batch_size.value).memory


def test_more_hosts_than_experts_are_allowed():
    assert hosted(workers=4, facts=model(experts=2)).workers.value == 4


# --- gate and batch


def test_the_gate_is_replicated_unless_a_flag_says_primary():
    chosen = hosted(workers=2, batch_size=32)
    assert (chosen.gate.value, chosen.data_ranks, chosen.global_batch_size.value) == ("replicated", 2, 64)
    assert chosen.gate.rejected[0].option == "primary"
    primary = hosted(workers=2, batch_size=32, gate="primary")
    assert (primary.gate.value, primary.data_ranks, primary.global_batch_size.value) == ("primary", 1, 32)
    assert "set by --gate primary" in primary.gate.reason
    assert primary.flops_per_step * 2 == chosen.flops_per_step


@pytest.mark.parametrize(
    ("inventory", "facts", "words"),
    [
        (CPU, None, "one process has all experts"),
        (TWO, None, "every worker has all experts"),
        (CPU, DENSE, "the model has no experts"),
    ],
)
def test_settings_of_expert_parallelism_are_not_used_by_other_strategies(
    inventory: Inventory, facts: ModelFacts | None, words: str
):
    chosen = planned(inventory, facts)
    assert (chosen.gate.value, chosen.placement.value, chosen.exchange_chunks.value) == (
        "replicated",
        "none",
        1,
    )
    for choice in (chosen.gate, chosen.placement, chosen.exchange_chunks):
        assert choice.reason == f"not used: {words}"
    flagged = planned(inventory, facts, gate="primary", placement="x.json", exchange_chunks=3)
    assert (flagged.gate.value, flagged.placement.value, flagged.exchange_chunks.value) == (
        "replicated",
        "none",
        1,
    )
    assert flagged.gate.reason.endswith(", instead of --gate primary")
    assert flagged.placement.reason.endswith(", instead of --placement x.json")
    assert flagged.exchange_chunks.reason.endswith(", instead of --exchange-chunks 3")
    assert flagged.data_ranks == flagged.workers.value


# --- placement


def test_placement_is_by_cost_and_speed_unless_a_flag_sets_it():
    assert hosted(workers=2).placement.value == "auto"
    assert hosted(workers=2).placement.rejected[0].option == "round_robin"
    for placement in ("round_robin", "/x/y.json"):
        assert hosted(workers=2, placement=placement).placement == Choice(
            placement, f"set by --placement {placement}"
        )
    assert hosted(workers=1).placement.reason == "one host has all experts"
    assert hosted(workers=2, auto=False).placement == Choice("round_robin", NO_AUTO)


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
    ("chosen", "expected", "words"),
    [
        (chunks(), 2, "8192 tokens"),
        (chunks(4096), 2, "4096 tokens"),
        (chunks(4095), 1, "too few"),
        (chunks(backend="gloo"), 1, "gloo"),
        (chunks(backend="gloo", on_gpu=False), 1, "same cores"),
        (chunks(workers=1), 1, "one host"),
        (chunks(auto=False), 1, "--no-auto"),
        (chunks(16, on_gpu=False, exchange_chunks=3), 3, "set by --exchange-chunks 3"),
        (chunks(unused="not used: x"), 1, "not used: x"),
    ],
)
def test_tokens_are_exchanged_in_chunks_if_computation_can_overlap(
    chosen: Choice[int], expected: int, words: str
):
    assert chosen.value == expected
    assert words in chosen.reason


def test_the_tokens_of_a_host_decide_the_chunks():
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
def test_grouped_products_are_chosen_if_they_are_fused(
    capability: tuple[int, int] | None, precision: str, expected: str
):
    assert choose_kernel(Config(), model(), precision, capability).value == expected
    for kernel in ("loop", "grouped"):
        chosen = choose_kernel(Config.of(expert_kernel=kernel), model(), precision, capability)
        assert chosen.value == kernel
        assert ("not fused" in chosen.reason) == (kernel == "grouped" and expected != "grouped")


def test_every_strategy_chooses_a_kernel():
    assert (
        planned(ONE).expert_kernel.value
        == planned(TWO).expert_kernel.value
        == hosted(TWO).expert_kernel.value
        == "grouped"
    )
    assert planned(ONE, precision="fp32").expert_kernel.value == "loop"
    assert planned(CPU).expert_kernel.value == "auto"
    assert planned(ONE, auto=False).expert_kernel == Choice("loop", NO_AUTO)
    assert planned(ONE, DENSE).expert_kernel.reason == "not used: the model has no experts"


def test_the_choices_of_expert_parallelism_are_in_the_json():
    chosen = hosted(workers=2).to_json()["choices"]
    assert {
        name: chosen[name]["value"] for name in ("gate", "placement", "exchange_chunks", "expert_kernel")
    } == {
        "gate": "replicated",
        "placement": "auto",
        "exchange_chunks": 1,
        "expert_kernel": "auto",
    }


# --- settings without effect


def test_settings_without_effect_are_reported():
    given = Config.of(gate="primary", placement="round_robin", exchange_chunks=4)
    message = unused_settings(given, SINGLE, model())
    assert message is not None
    assert message.startswith(
        "--gate primary, --placement round_robin, --exchange-chunks 4 are not used: one process "
        "has all experts; "
    )
    assert "--parallel-strategy expert_parallel" in message
    one = unused_settings(Config.of(exchange_chunks=4), DATA_PARALLEL, model())
    assert one is not None
    assert one.startswith("--exchange-chunks 4 is not used: every worker has all experts")
    assert unused_settings(
        given, SINGLE, DENSE
    ) == "--gate primary, --placement round_robin, --exchange-chunks 4 are not used: " + (
        "the model has no experts"
    )


def test_spares_without_live_recovery_are_reported():
    for facts, flag in ((model(), "--parallel-strategy expert_parallel"), (DENSE, "--recovery live")):
        message = unused_settings(Config.of(spares=1), DATA_PARALLEL, facts)
        assert message is not None
        assert message.startswith("--spares 1 is not used: standby hosts")
        assert message.endswith(f"add {flag}")
    assert unused_settings(Config.of(spares=1), LIVE_DATA_PARALLEL, DENSE) is None


def test_settings_with_effect_are_not_reported():
    assert unused_settings(Config.of(gate="primary"), EXPERT_PARALLEL, model()) is None
    assert unused_settings(Config.of(), SINGLE, model()) is None
