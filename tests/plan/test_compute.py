"""Precision, tf32, compilation, fused optimizer and cuDNN benchmarking by device."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.inventories import gpu, machine, model, planned
from orchestrator.config.settings import Config
from orchestrator.plan.compute import choose_precision, optimizer_moments
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.types import GIB

CPU = machine()
H200 = machine(gpu())


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
def test_compute_capability_sets_the_precision(capability: tuple[int, int], precision: str):
    inventory = machine(gpu(capability=capability))
    chosen = planned(inventory)
    assert chosen.precision.value == precision
    assert f"{capability[0]}.{capability[1]}" in chosen.precision.reason
    assert chosen.tf32.value == (capability >= (8, 0))
    assert choose_precision(Config(), inventory, "cuda:0") == chosen.precision


def test_the_chosen_gpu_sets_the_precision():
    mixed = machine(gpu(0, free=GIB, capability=(9, 0)), gpu(1, capability=(7, 5)))
    chosen = planned(mixed, gpu_mode="single_gpu")
    assert (chosen.device.value, chosen.precision.value) == ("cuda:1", "fp16")


@pytest.mark.parametrize("bf16", [True, False])
def test_a_cpu_computes_in_fp32(bf16: bool):
    assert planned(machine(cpu_bf16=bf16)).precision.value == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("inventory", [CPU, H200], ids=["cpu", "gpu"])
def test_a_flag_sets_the_precision(precision: str, inventory: Inventory):
    chosen = planned(inventory, precision=precision).precision
    assert chosen.value == precision
    assert chosen.reason.startswith(f"set by --precision {precision}")
    assert ("many times slower" in chosen.reason) == (inventory is CPU and precision != "fp32")


@pytest.mark.parametrize("name", ["tf32", "cudnn_benchmark"])
@pytest.mark.parametrize("value", ["on", "off"])
def test_a_flag_sets_a_switch_if_the_device_has_it(name: str, value: str):
    flag: dict[str, Any] = {name: value}
    assert planned(H200, **flag).choices()[name].value == (value == "on")
    on_cpu = planned(CPU, **flag).choices()[name]
    assert (on_cpu.value, "CPU" in on_cpu.reason) == (False, True)


def test_a_long_run_on_a_gpu_is_compiled_and_a_short_one_is_not():
    long = model(flops_per_sample=1e12, samples=10**6)
    short = model(flops_per_sample=1e9, samples=1000)
    assert planned(H200, long).compile.value
    uncompiled = planned(H200, short).compile
    assert not uncompiled.value
    assert uncompiled.reason == (
        "the run is short (about 640 ms of work at 4 ms a step, the shortest that is assumed)"
    )
    for plan in (planned(H200, short), planned(CPU, long), planned(H200, long, deterministic=True)):
        assert [rejected.option for rejected in plan.compile.rejected] == ["on"], (
            "the report advises no other"
        )
    assert not planned(CPU, long).compile.value
    assert not planned(H200, long, deterministic=True).compile.value
    assert not planned(H200, long, compile="off").compile.value
    assert planned(CPU, short, compile="on").compile.value


def test_a_task_with_its_own_optimizer_keeps_it():
    chosen = planned(CPU, model(own_optimizer=True)).fused_optimizer
    assert (chosen.value, chosen.reason) == (False, "the task has its own optimizer")


def test_adamw_in_8_bit_has_a_quarter_of_the_state_and_no_fused_kernel():
    settings = Config.of(optimizer="adamw8bit").optim
    assert optimizer_moments(settings, model()) == pytest.approx(2 / 4, rel=0.02)
    assert optimizer_moments(settings, model(own_optimizer=True)) == 2.0
    chosen = planned(CPU, model(), optimizer="adamw8bit")
    assert not chosen.fused_optimizer.value
    assert "adamw8bit" in chosen.fused_optimizer.reason


@pytest.mark.parametrize("strategy", ["data_parallel", "expert_parallel"])
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_sgd_of_shards_is_not_fused(strategy: str, sharding: str):
    settings = {"parallel_strategy": strategy, "sharding": sharding, "workers": 2}
    chosen = planned(CPU, model(experts=4), optimizer="sgd", **settings).fused_optimizer
    assert chosen.value == (sharding == "none")
    if sharding != "none":
        assert chosen.reason == f"torch has no fused SGD for shards of weights (sharding {sharding})"
    assert planned(CPU, model(experts=4), optimizer="adamw", **settings).fused_optimizer.value
