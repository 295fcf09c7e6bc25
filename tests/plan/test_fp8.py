"""``--precision fp8``: the devices and models that the plan accepts, and the choices that follow."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.balance import moe_layers
from experts.kernels.adapters import Adapters
from experts.moe.bank import ExpertBank, ExpertForm
from harness.fakes.inventories import gpu, machine, model, planned
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import plan, planned_facts
from orchestrator.tasks.load import load_task
from orchestrator.train.group.world import World
from orchestrator.train.worker.build_model import build_parts
from orchestrator.types import GIB, Choice

H200 = machine(gpu())
TEXT = "--precision fp8"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_hopper_and_data_center_blackwell_compute_in_fp8(capability: tuple[int, int]) -> None:
    chosen = planned(machine(gpu(capability=capability)), precision="fp8")
    assert chosen.precision.value == "fp8"
    assert TEXT in chosen.precision.reason
    assert chosen.expert_kernel.value == "grouped"


@pytest.mark.parametrize(
    ("inventory", "found"),
    [
        (machine(), "the device is the CPU"),
        (machine(gpu(capability=(8, 9))), "compute capability 8.9"),
        (machine(gpu(capability=(12, 0))), "compute capability 12.0"),
        (machine(gpu(), gpu(1, 90 * GIB, capability=(8, 0))), "GPU of 90 GiB has compute capability 8.0"),
        (machine(gpu(), gpu(1, capability=(12, 0))), "compute capability 12.0"),
    ],
    ids=["cpu", "ada", "consumer blackwell", "an older one of two GPUs", "a later one of two GPUs"],
)
def test_another_device_is_refused_with_what_was_found(inventory: Inventory, found: str) -> None:
    with pytest.raises(ResourceError, match=re.escape(found)) as refused:
        planned(inventory, precision="fp8")
    assert "leave it out" in str(refused.value)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (model(experts=0, expert_parameters=0, moe_layers=0), "this model has none"),
        (model(fp8_obstacle="experts of the form ffn"), "experts of the form ffn"),
    ],
    ids=["dense", "ffn"],
)
def test_another_model_is_refused_with_what_was_found(facts: Any, found: str) -> None:
    with pytest.raises(UserError, match=found) as refused:
        planned(H200, facts, precision="fp8")
    assert "use --precision bf16" in str(refused.value)


def test_auto_never_chooses_it() -> None:
    assert planned(H200).precision.value == "bf16"


def test_the_loop_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="--expert-kernel loop"):
        planned(H200, precision="fp8", expert_kernel="loop")
    assert planned(H200, precision="fp8", auto=False).expert_kernel.value == "grouped"


def test_all_else_is_planned_as_in_bf16() -> None:
    facts = model(large_experts=500_000)
    in_fp8 = planned(H200, facts, precision="fp8")
    in_bf16 = planned(H200, facts, precision="bf16")
    same: dict[str, Any] = {"precision": Choice("bf16", ""), "expert_kernel": in_bf16.expert_kernel}
    assert replace(in_fp8, **same) == replace(in_bf16, **same)
    assert in_fp8.memory.weight_copies > 0
    config = Config.of(precision="fp8")
    assert planned_facts(config, facts, in_fp8).copied_experts == 500_000


@pytest.mark.parametrize(
    ("width", "sizes", "form", "found"),
    [
        (128, (64, 192), ExpertForm(), None),
        (128, (64, 200), ExpertForm(), "128 × 64, 200; multiples of 64"),
        (100, (64,), ExpertForm(), "100 × 64; multiples of 64"),
        (128, (64,), ExpertForm("ffn"), "form ffn;"),
        (128, (64,), ExpertForm(bias=True), "form swiglu with biases;"),
        (128, (64,), ExpertForm(activation=lambda rows_RH: rows_RH[:, ::2]), "with an activation of its own"),
        (128, (64,), ExpertForm(adapters=Adapters(4, 8.0)), "with adapters"),
    ],
)
def test_a_bank_names_its_obstacle(
    width: int, sizes: tuple[int, ...], form: ExpertForm, found: str | None
) -> None:
    obstacle = ExpertBank(width, sizes, form).fp8_obstacle()
    assert obstacle is None if found is None else found in str(obstacle)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, ""),
        ({"expert_kind": "ffn"}, "form ffn"),
        ({"expert_hidden_size": (72,)}, "128 × 72"),
    ],
)
def test_the_facts_of_a_task_name_the_obstacle(settings: dict[str, Any], found: str) -> None:
    task = load_task(Config.of(task="text", precision="fp8", **settings))
    obstacle = model_facts(task, "cuda:0", "fp8").fp8_obstacle
    assert found in obstacle
    assert bool(found) == bool(obstacle)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_banks_of_a_run_compute_as_the_plan_says(precision: str) -> None:
    config = Config.of(task="text", precision=precision)
    parts = build_parts(config, plan(config, H200, model()), load_task(config), World.single_process("cpu"))
    banks = [layer.bank for _, layer in moe_layers(parts.model)]
    assert [bank.fp8 for bank in banks] == [precision == "fp8"] * 2
    # All else is computed in bf16, without a loss scale.
    assert parts.precision.dtype == torch.bfloat16
    assert parts.precision.scale is None
