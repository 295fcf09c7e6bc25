"""Whole plans: every open question has an answer with a reason, on invented machines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from harness.fakes.inventories import (
    cluster,
    configs,
    gpu,
    machine,
    machines,
    model,
    models,
    planned,
    planned_or_refused,
)
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.compute import choose_precision, with_memory_settings
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory
from orchestrator.plan.evolution import grown
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.types import GIB

CPU = machine()
H200 = machine(gpu())
TWO = machine(gpu(), gpu(1))
FOUR_SMALL = machine(*(gpu(index, total=16 * GIB) for index in range(4)))
BIG = model(parameters=10**9, trainable=10**9, blocks=10)  # 16 GB of state


def sharding_of(chosen: Plan, offload: bool = False) -> ModelSharding:
    if chosen.strategy.value == "expert_parallel":
        return ModelSharding(
            chosen.workers.value,
            "experts",
            primary=chosen.gate.value == "primary",
            expert_replicas=chosen.expert_replicas.value,
            copies=chosen.expert_replicas.value > 1 or chosen.rebalance.value,
            dense=chosen.sharding.value,
        )
    return ModelSharding(chosen.workers.value, chosen.sharding.value, offload)


# --- properties for any settings on any machine


@settings(max_examples=100, deadline=None)
@given(config=configs(), inventory=machines(), facts=models())
def test_every_choice_has_a_value_and_a_reason(config: Config, inventory: Inventory, facts: ModelFacts):
    chosen = planned_or_refused(config, inventory, facts)
    assert len(chosen.choices()) >= 27
    for name, choice in chosen.choices().items():
        assert choice.value is not None, name
        assert len(choice.reason.strip()) >= 3, name
        assert all(rejected.option and rejected.why for rejected in choice.rejected), name
    batch = chosen.batch_size.value
    recompute = chosen.activation_checkpointing.value
    sharding = sharding_of(chosen, config.parallel.cpu_offload)
    rules = chosen.evolution_rules
    facts = with_memory_settings(config, facts)
    largest = grown(facts, rules.max_experts) if rules else facts
    single_pass = chosen.accumulation_steps.value == 1
    limit = chosen.memory.limit
    assert chosen.memory == estimate_memory(largest, batch, recompute, limit, sharding, single_pass)
    assert chosen.data_ranks == sharding.data_ranks
    covered = batch * chosen.accumulation_steps.value * chosen.data_ranks
    # The batch of a reproducible run does not follow the workers: some may have none of it.
    least = 1 if config.run.reproducible else chosen.data_ranks
    assert covered >= chosen.global_batch_size.value >= least
    assert chosen.total_steps.value is None or chosen.total_steps.value >= 1
    assert chosen.loader_workers.value >= 0
    assert chosen.log_every.value >= 1
    json.dumps(chosen.to_json(), allow_nan=False)


@settings(max_examples=120, deadline=None)
@given(config=configs("deterministic", "tf32", "cudnn_benchmark", "auto", "precision"), inventory=machines())
def test_a_deterministic_plan_has_neither_tf32_nor_cudnn_benchmark(config: Config, inventory: Inventory):
    chosen = planned_or_refused(config, inventory, model())
    if config.run.deterministic or chosen.device.value == "cpu":
        assert not chosen.tf32.value
        assert not chosen.cudnn_benchmark.value


@settings(max_examples=120, deadline=None)
@given(inventory=machines(), facts=models())
def test_the_plan_fits_unless_one_sample_does_not(inventory: Inventory, facts: ModelFacts):
    chosen = planned_or_refused(Config(), inventory, facts)
    recompute = chosen.activation_checkpointing.value
    one_sample = estimate_memory(facts, 1, recompute, chosen.memory.limit, sharding_of(chosen))
    assert chosen.memory.fits == one_sample.fits


def test_planning_is_deterministic():
    assert planned(H200) == planned(H200)


def test_the_json_holds_values_reasons_and_rejected_options():
    saved = json.loads(json.dumps(planned(TWO, gpu_mode="single_gpu").to_json()))
    assert saved["choices"]["device"]["rejected"] == [
        {"option": "the other 1 GPUs", "why": "one process trains on one device"}
    ]
    assert saved["choices"]["strategy"]["value"] == "single"
    assert saved["choices"]["starting_batch"]["value"] == "16 × 4"
    assert saved["memory"]["total"] > 0
    assert saved["flops_per_step"] > 0


def test_the_choices_keep_their_order():
    names = list(planned(TWO).choices())
    assert names[:6] == ["device", "strategy", "workers", "backend", "sharding", "precision"]
    assert planned(TWO).to_json()["choices"]["workers"]["value"] == 2


def test_recomputation_costs_a_third_more_arithmetic():
    plain = planned(CPU)
    recomputed = planned(CPU, activation_checkpointing="on")
    assert recomputed.flops_per_step == pytest.approx(plain.flops_per_step * 4 / 3)


# --- --no-auto


def test_no_auto_gives_plain_defaults_and_says_so():
    facts = model(gathered_bytes=None)
    chosen = planned(H200, facts, auto=False).choices()
    plain = {name: choice.value for name, choice in chosen.items() if choice.reason == NO_AUTO}
    assert plain == {
        "strategy": "single",
        "precision": "fp32",
        "compile": False,
        "cuda_graph": False,
        "tf32": False,
        "expert_kernel": "loop",
        "evolution": "off",
        "batch_size": 32,
        "activation_checkpointing": False,
        "fused_optimizer": False,
        "cudnn_benchmark": False,
        "loader_workers": 0,
        "warmup_steps": 0,
        "log_every": 10,
    }
    sizes = [chosen[name].value for name in ("accumulation_steps", "global_batch_size", "eval_batch_size")]
    assert sizes == [1, 32, 32]
    on_device = planned(H200, auto=False).data_on_device
    assert (on_device.value, on_device.reason) == (False, NO_AUTO)
    prefetch = planned(H200, facts, auto=False, loader_workers=3).prefetch
    assert (prefetch.value, prefetch.reason) == (2, NO_AUTO)


def test_no_auto_keeps_the_values_of_flags():
    flags: dict[str, Any] = {
        "precision": "bf16",
        "tf32": "on",
        "batch_size": 48,
        "loader_workers": 2,
        "warmup_steps": 7,
        "log_every": 3,
    }
    chosen = planned(H200, auto=False, **flags).choices()
    assert {name: chosen[name].value for name in flags} == flags | {"tf32": True}
    assert all(chosen[name].reason.startswith("set by") for name in flags)


def test_no_auto_with_workers_gives_plain_defaults():
    chosen = planned(TWO, auto=False, workers=2)
    assert (chosen.precision.value, chosen.sharding.reason, chosen.workers.value) == ("fp32", NO_AUTO, 2)
    assert (chosen.batch_size.value, chosen.global_batch_size.value) == (32, 64)


@settings(max_examples=100, deadline=None)
@given(
    config=configs("auto", "precision", "tf32", "loader_workers", "batch_size"),
    inventory=machines(),
    facts=models(),
)
def test_only_no_auto_is_given_as_its_own_reason(config: Config, inventory: Inventory, facts: ModelFacts):
    chosen = planned_or_refused(config, inventory, facts).choices()
    because_of_no_auto = [name for name, choice in chosen.items() if "--no-auto" in choice.reason]
    assert bool(because_of_no_auto) == (not config.run.auto)


# --- one process and several workers


def test_one_process_shards_nothing_and_has_no_backend():
    chosen = planned(H200)
    assert chosen.strategy.value == "single"
    assert chosen.workers.value == 1
    assert chosen.backend.value == "none"
    assert chosen.sharding.value == "none"
    assert chosen.device.value == "cuda:0"
    sharding = planned(H200, sharding="zero2").sharding
    assert sharding.value == "none"
    assert "instead of --sharding zero2" in sharding.reason
    planned(CPU, sync_batchnorm=True, backend="nccl")
    message = r"--cpu-offload .* one process \(one GPU was found\).*--parallel-strategy data_parallel"
    with pytest.raises(UserError, match=message):
        planned(H200, cpu_offload=True)


def test_two_gpus_train_data_parallel():
    chosen = planned(TWO)
    assert [chosen.device.value, chosen.strategy.value, chosen.workers.value] == ["cuda", "data_parallel", 2]
    assert [chosen.backend.value, chosen.sharding.value, chosen.precision.value] == ["nccl", "none", "bf16"]
    assert chosen.batch_size.value == 64
    assert chosen.accumulation_steps.value == 1
    assert chosen.global_batch_size.value == 128
    assert chosen.flops_per_step == 2 * planned(H200).flops_per_step


def test_the_least_of_all_gpus_is_planned_for():
    mixed = machine(
        gpu(0, total=80 * GIB, free=5 * GIB),
        gpu(1, total=24 * GIB, capability=(8, 6)),
        gpu(2, total=32 * GIB, capability=(7, 0)),
    )
    chosen = planned(mixed)
    assert chosen.memory.limit == 5 * GIB
    assert (chosen.precision.value, chosen.tf32.value) == ("fp16", False)
    assert choose_precision(Config(), mixed, "cuda").value == "fp16"
    assert "24.0 GiB; planned for the smallest" in chosen.device.reason
    two_newer = planned(mixed, devices=(0, 1))
    assert (two_newer.precision.value, two_newer.workers.value) == ("bf16", 2)
    assert planned(mixed, devices=(1, 2)).memory.limit == pytest.approx(0.9 * 24 * GIB)


def test_workers_on_cpus_share_the_memory_of_their_node():
    chosen = planned(machine(ram_free=10 * GIB, cores=4), parallel_strategy="data_parallel")
    assert (chosen.workers.value, chosen.device.value, chosen.backend.value) == (4, "cpu", "gloo")
    assert chosen.memory.limit == 2 * GIB
    assert chosen.global_batch_size.value == 256
    on_two_nodes = planned(machine(ram_free=10 * GIB), where=cluster(0, 0), workers=2)
    assert on_two_nodes.memory.limit == 8 * GIB


def test_a_joined_cluster_has_workers_even_if_its_nodes_have_one_gpu():
    """The inventory is that of one worker's node: one GPU there does not make the run one
    process."""
    chosen = planned(H200, where=cluster(1, 1, 1))
    assert (chosen.strategy.value, chosen.workers.value, chosen.device.value) == ("data_parallel", 3, "cuda")
    assert plan(Config(), H200, model(), in_cluster=True).strategy.value == "data_parallel"


def test_a_state_that_does_not_fit_is_sharded():
    chosen = planned(FOUR_SMALL, BIG)
    assert chosen.sharding.value == "zero2"
    assert chosen.memory.fits
    assert not planned(FOUR_SMALL, BIG, sharding="none").memory.fits


def test_compiled_experts_on_hosts_are_not_recomputed():
    settings: dict[str, Any] = {"parallel_strategy": "expert_parallel", "workers": 2, "compile": "on"}
    experts = model(experts=4, expert_parameters=10**6)
    assert planned(TWO, experts, **settings).compile.value
    with pytest.raises(UserError, match="--compile and recomputed activations"):
        planned(TWO, experts, **settings, activation_checkpointing="on")


def test_the_estimate_accounts_for_offloading():
    roomy = replace(FOUR_SMALL, ram_free=21 * GIB)
    chosen = planned(roomy, BIG, cpu_offload=True)
    assert (chosen.sharding.value, chosen.memory.optimizer) == ("zero2", 0)
    # Four fifths of the memory may be used; two nodes have half of the 14.9 GiB of state each.
    with pytest.raises(ResourceError, match=r"keeps 14\.9 GiB of .*, and 12\.8 GiB is usable there"):
        planned(FOUR_SMALL, BIG, cpu_offload=True)
    planned(FOUR_SMALL, BIG, cluster(2, 2), cpu_offload=True)


def test_a_resumed_run_keeps_its_global_batch_on_other_workers():
    chosen = plan(Config(), TWO, model(), {"global_batch_size": 256})
    assert chosen.global_batch_size.value == 256
    assert chosen.global_batch_size.reason == "the run was started with it"
    assert chosen.batch_size.value * chosen.accumulation_steps.value * chosen.workers.value == 256
