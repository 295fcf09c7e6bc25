"""The plan: every open question answered, each answer with its reason, on machines that are not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import PLAIN, Plan, choose_device, choose_precision, plan
from orchestrator.types import GIB, MIB
from tests.support.inventories import configs, gpu, machine, machines, model, models, planned_or_refused

CPU = machine()
H200 = machine(gpu())


def planned(inventory: Inventory = H200, facts: ModelFacts | None = None, **given_settings: Any) -> Plan:
    return plan(Config.of(**given_settings), inventory, facts or model())


def spread_of(found: Plan, offload: bool = False) -> ModelSharding:
    if found.strategy.value == "expert_parallel":
        return ModelSharding(found.workers.value, "experts", primary=found.gate.value == "primary")
    return ModelSharding(found.workers.value, found.sharding.value, offload)


# --- whatever is asked, on whatever machine


@settings(max_examples=250, deadline=None)
@given(config=configs(), inventory=machines(), facts=models())
def test_every_choice_has_a_value_and_a_reason(config: Config, inventory: Inventory, facts: ModelFacts):
    found = planned_or_refused(config, inventory, facts)
    assert len(found.choices()) >= 27
    for name, choice in found.choices().items():
        assert choice.value is not None, name
        assert len(choice.reason.strip()) >= 3, name
        assert all(rejected.option and rejected.why for rejected in choice.rejected), name
    batch, recompute, spread = (
        found.batch_size.value,
        found.activation_checkpointing.value,
        spread_of(found, config.parallel.cpu_offload),
    )
    assert found.memory == estimate_memory(facts, batch, recompute, found.memory.limit, spread)
    assert found.data_ranks == spread.data_ranks
    assert (
        batch * found.accumulation_steps.value * found.data_ranks
        >= found.global_batch_size.value
        >= found.data_ranks
    )
    assert found.total_steps.value >= 1
    assert found.loader_workers.value >= 0
    assert found.log_every.value >= 1
    json.dumps(found.to_json(), allow_nan=False)


@settings(max_examples=120, deadline=None)
@given(config=configs("deterministic", "tf32", "cudnn_benchmark", "auto", "precision"), inventory=machines())
def test_a_deterministic_plan_has_neither_tf32_nor_cudnn_timing(config: Config, inventory: Inventory):
    found = planned_or_refused(config, inventory, model())
    if config.run.deterministic:
        assert not found.tf32.value
        assert not found.cudnn_benchmark.value
    if found.device.value == "cpu":
        assert not found.tf32.value
        assert not found.cudnn_benchmark.value


@settings(max_examples=120, deadline=None)
@given(inventory=machines(), facts=models())
def test_the_plan_fits_unless_nothing_does(inventory: Inventory, facts: ModelFacts):
    found = planned_or_refused(Config(), inventory, facts)
    smallest = estimate_memory(
        facts, 1, found.activation_checkpointing.value, found.memory.limit, spread_of(found)
    )
    assert found.memory.fits == smallest.fits


def test_the_same_question_has_the_same_answer():
    assert planned() == planned()


def test_the_plan_as_json_keeps_values_reasons_and_what_was_rejected():
    found = json.loads(json.dumps(planned(machine(gpu(), gpu(1)), gpu_mode="single_gpu").to_json()))
    assert found["choices"]["device"]["rejected"] == [
        {"option": "the other 1 GPUs", "why": "one process trains on one device"}
    ]
    assert found["choices"]["strategy"]["value"] == "single"
    assert found["choices"]["starting_batch"]["value"] == "16 × 4"
    assert found["memory"]["total"] > 0
    assert found["flops_per_step"] > 0


# --- device


def test_a_gpu_is_taken_where_there_is_one_and_the_emptiest_of_several():
    assert planned(H200).device.value == "cuda:0"
    assert planned(CPU).device.value == "cpu"
    assert planned(H200, gpu_mode="cpu").device.value == "cpu"
    several = machine(gpu(0, free=10 * GIB), gpu(1, free=70 * GIB), gpu(2, free=70.5 * GIB))
    assert planned(several, gpu_mode="single_gpu").device.value == "cuda:1"
    assert planned(several, gpu_mode="single_gpu").device.rejected


def test_the_gpu_asked_for_is_taken_and_the_first_of_several():
    several = machine(gpu(0), gpu(1, free=GIB), gpu(2))
    chosen = planned(several, devices=1)
    assert (chosen.device.value, chosen.strategy.value) == ("cuda:1", "single")
    assert chosen.device.reason.startswith("asked for by --devices 1: ")
    assert chosen.memory.limit == GIB
    assert planned(several, devices=(2, 0), workers=1).device.value == "cuda:2"
    with pytest.raises(ResourceError, match="--devices 3 names GPU 3, but this machine has 3 GPUs"):
        choose_device(Config.of(devices=3), several)


def test_single_gpu_without_one_is_a_resource_error():
    with pytest.raises(ResourceError, match="needs one GPU; 0 were found") as caught:
        planned(CPU, gpu_mode="single_gpu")
    assert caught.value.exit_code == 3
    broken = machine(gpu_error="the driver shows 1 GPU(s), but torch sees none\nupdate the driver")
    with pytest.raises(ResourceError, match=r"--gpu-mode multi_gpu needs two GPUs or more; 1 was found\."):
        choose_device(Config.of(gpu_mode="multi_gpu"), H200)
    with pytest.raises(ResourceError, match="but torch sees none") as caught:
        choose_device(Config.of(gpu_mode="single_gpu"), broken)
    assert caught.value.exit_code == 3


def test_a_gpu_that_cannot_be_used_is_the_reason_for_the_cpu():
    found = planned(machine(gpu_error="the driver shows 1 GPU(s), but torch sees none"))
    assert found.device.value == "cpu"
    assert "torch sees none" in found.device.reason


# --- precision and arithmetic


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ((6, 1), "fp16"),
        ((7, 0), "fp16"),
        ((7, 5), "fp16"),
        ((8, 0), "bf16"),
        ((8, 9), "bf16"),
        ((9, 0), "bf16"),
        ((12, 0), "bf16"),
    ],
)
def test_precision_by_compute_capability(capability: tuple[int, int], precision: str):
    inventory = machine(gpu(capability=capability))
    found = planned(inventory)
    assert found.precision.value == precision
    assert f"{capability[0]}.{capability[1]}" in found.precision.reason
    assert found.tf32.value == (capability >= (8, 0))
    assert choose_precision(Config(), inventory, "cuda:0") == found.precision


def test_precision_is_that_of_the_chosen_gpu():
    mixed = machine(gpu(0, free=GIB, capability=(9, 0)), gpu(1, capability=(7, 5)))
    alone = planned(mixed, gpu_mode="single_gpu")
    assert (alone.device.value, alone.precision.value) == ("cuda:1", "fp16")


@pytest.mark.parametrize("bf16", [True, False])
def test_a_cpu_computes_in_fp32(bf16: bool):
    assert planned(machine(cpu_bf16=bf16)).precision.value == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("inventory", [CPU, H200], ids=["cpu", "gpu"])
def test_a_precision_asked_for_is_given(precision: str, inventory: Inventory):
    found = planned(inventory, precision=precision).precision
    assert found.value == precision
    assert found.reason.startswith(f"asked for by --precision {precision}")
    assert ("many times slower" in found.reason) == (inventory is CPU and precision != "fp32")


@pytest.mark.parametrize("name", ["tf32", "cudnn_benchmark"])
@pytest.mark.parametrize("value", ["on", "off"])
def test_a_switch_asked_for_is_given_where_the_device_has_it(name: str, value: str):
    asked: dict[str, Any] = {name: value}
    assert planned(H200, **asked).choices()[name].value == (value == "on")
    on_cpu = planned(CPU, **asked).choices()[name]
    assert (on_cpu.value, "CPU" in on_cpu.reason) == (False, True)


def test_a_long_run_on_a_gpu_is_compiled_and_a_short_one_is_not():
    long, short = model(flops_per_sample=1e12, samples=10**6), model(flops_per_sample=1e9, samples=1000)
    assert planned(H200, long).compile.value
    assert (planned(H200, short).compile.value, planned(H200, short).compile.reason[:16]) == (
        False,
        "the run is short",
    )
    assert not planned(CPU, long).compile.value
    assert not planned(H200, long, deterministic=True).compile.value
    assert not planned(H200, long, compile="off").compile.value
    assert planned(CPU, short, compile="on").compile.value


# --- --no-auto


def test_no_auto_gives_plain_defaults_and_says_so():
    facts = model(gathered_bytes=None)
    found = planned(H200, facts, auto=False).choices()
    plain = {name: found[name].value for name in found if found[name].reason == PLAIN}
    assert plain == {
        "strategy": "single",
        "precision": "fp32",
        "compile": False,
        "tf32": False,
        "expert_kernel": "loop",
        "batch_size": 32,
        "activation_checkpointing": False,
        "fused_optimizer": False,
        "cudnn_benchmark": False,
        "loader_workers": 0,
        "warmup_steps": 0,
        "log_every": 10,
    }
    assert (
        found["accumulation_steps"].value,
        found["global_batch_size"].value,
        found["eval_batch_size"].value,
    ) == (1, 32, 32)
    gathered = planned(H200, auto=False).data_on_device
    assert (gathered.value, gathered.reason) == (False, PLAIN)
    fetched = planned(H200, facts, auto=False, loader_workers=3).prefetch
    assert (fetched.value, fetched.reason) == (2, PLAIN)


def test_no_auto_keeps_what_was_asked_for():
    asked: dict[str, Any] = {
        "precision": "bf16",
        "tf32": "on",
        "batch_size": 48,
        "loader_workers": 2,
        "warmup_steps": 7,
        "log_every": 3,
    }
    found = planned(H200, auto=False, **asked).choices()
    assert {name: found[name].value for name in asked} == asked | {"tf32": True}
    assert all("asked for" in found[name].reason for name in asked)


@settings(max_examples=100, deadline=None)
@given(
    config=configs("auto", "precision", "tf32", "loader_workers", "batch_size"),
    inventory=machines(),
    facts=models(),
)
def test_only_no_auto_speaks_of_no_auto(config: Config, inventory: Inventory, facts: ModelFacts):
    chosen = planned_or_refused(config, inventory, facts).choices()
    said = [name for name, choice in chosen.items() if "--no-auto" in choice.reason]
    assert bool(said) == (not config.run.auto)


# --- limits, loading, length


def test_the_limit_is_the_asked_share_and_never_more_than_is_free():
    assert planned(machine(gpu(total=80 * GIB)), gpu_memory_fraction=0.5).memory.limit == 40 * GIB
    assert planned(machine(gpu(total=80 * GIB, free=10 * GIB))).memory.limit == 10 * GIB
    assert planned(machine(ram_free=10 * GIB)).memory.limit == 8 * GIB


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_loader_processes_take_the_cores_beside_the_one_that_trains(cores: int, workers: int):
    read_singly = model(gathered_bytes=None)
    assert planned(machine(gpu(), cores=cores), read_singly).loader_workers.value == workers
    assert planned(machine(cores=cores), read_singly).loader_workers.value == 0
    assert planned(machine(gpu(), cores=cores)).loader_workers.value == 0
    assert planned(machine(gpu(), cores=cores), loader_workers=5).loader_workers.value == 5


@pytest.mark.parametrize(
    ("gathered", "on_device"), [(None, False), (0, True), (3 * GIB, True), (5 * GIB, False)]
)
def test_small_data_lives_on_the_gpu(gathered: int | None, on_device: bool):
    assert planned(H200, model(gathered_bytes=gathered)).data_on_device.value == on_device
    assert not planned(CPU, model(gathered_bytes=gathered)).data_on_device.value


@pytest.mark.parametrize(
    ("given_settings", "steps"),
    [
        ({"batch_size": 100, "epochs": 3}, 300),
        ({"batch_size": 300, "epochs": 1}, 34),
        ({"batch_size": 100, "epochs": 3, "max_steps": 7}, 7),
        ({"batch_size": 100, "epochs": 3, "max_steps": 7000}, 300),
        ({"debug": True}, 4),
        ({"debug": True, "max_steps": 2}, 2),
    ],
)
def test_steps(given_settings: dict[str, Any], steps: int):
    assert planned(CPU, **given_settings).total_steps.value == steps


def test_a_tiny_data_set_still_has_a_step():
    found = planned(CPU, model(samples=1, validation_samples=0, gathered_bytes=MIB), epochs=1)
    assert (found.total_steps.value, found.batch_size.value, found.global_batch_size.value) == (1, 1, 1)


def test_warm_up_is_a_twentieth_and_at_most_a_thousand():
    assert planned(CPU, batch_size=100, epochs=1).warmup_steps.value == 5
    assert planned(CPU, batch_size=1, epochs=300).warmup_steps.value == 1000
    assert planned(CPU, warmup_steps=9).warmup_steps.value == 9


def test_a_task_with_its_own_optimizer_keeps_it():
    found = planned(CPU, model(own_optimizer=True)).fused_optimizer
    assert (found.value, found.reason) == (False, "the task brings its own optimizer")


def test_more_arithmetic_for_recomputation():
    plain, recomputed = planned(CPU), planned(CPU, activation_checkpointing="on")
    assert recomputed.flops_per_step == pytest.approx(plain.flops_per_step * 4 / 3)
