"""The reference steps are many and different enough to separate the costs of the host; large steps show the
slowdown of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from experts.balance import moe_layers
from harness.fakes.cost_machines import device
from harness.fakes.inventories import gpu, machine
from orchestrator.measure.calibration import whole_steps
from orchestrator.measure.calibration.whole_steps import (
    LARGE_MODELS,
    REFERENCE_MODELS,
    LargeModel,
    LargeStep,
    ReferenceModel,
    ReferenceStep,
    fit_host_costs,
    make_yardstick,
    reference_models,
    sustained_slowdown,
    with_sustained,
)
from orchestrator.measure.timed_steps import StepRunner
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.machine import Machine, Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MicroBatchOps, MoveOp, ProductOp
from orchestrator.tasks.load import load_task

GPU = device(products={"bf16": {}, "fp32": {}}, grouped=PiecewiseCurve((32.0, 128.0), (2.0, 1.0)))
OPS = MicroBatchOps(
    samples=4, products=(ProductOp(100, 200, 50),), moves=(MoveOp("plain", 10**6),), operations=10
)


def traced(model: ReferenceModel, on_gpu: bool) -> MicroBatchOps:
    config, batch = model.config(on_gpu)
    return trace_micro_batch(load_task(config), batch, TraceOptions(on_gpu, model.precision, True))


def test_a_gpu_runs_references_in_bf16_and_dense_ones_in_fp32_too() -> None:
    models = reference_models(GPU)
    assert {model.precision for model in models if model.experts} == {"bf16"}
    assert {model.precision for model in models if not model.experts} == {"bf16", "fp32"}
    assert reference_models(device(asynchronous=False)) == REFERENCE_MODELS


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_costs_of_the_host_are_recovered_from_the_reference_steps(on_gpu: bool) -> None:
    """Also with errors of one percent in the measured times."""
    models = reference_models(GPU) if on_gpu else REFERENCE_MODELS
    ops = [traced(model, on_gpu) for model in models]
    costs = (2e-5, 9e-5, 3e-4 if on_gpu else 0.0, 5e-6, 8e-4)
    operation_s, launch_s, sort_s, view_s, step_s = costs
    seconds = [
        op.operations * operation_s + op.launches * launch_s + op.sorts * sort_s + op.views * view_s + step_s
        for op in ops
    ]
    assert fit_host_costs(ops, seconds) == pytest.approx(costs, rel=1e-6, abs=1e-12)
    noisy = [value * (1 + 0.01 * (-1) ** index) for index, value in enumerate(seconds)]
    assert fit_host_costs(ops, noisy)[:2] == pytest.approx(costs[:2], rel=0.3)


@pytest.mark.extended
def test_the_yardstick_times_a_dense_step_and_one_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are built each time; here they are as small as on a CPU."""
    num_moe_layers: list[int] = []

    def fake_seconds(_: ReferenceStep, runner: StepRunner, steps: int) -> float:
        num_moe_layers.append(len(moe_layers(runner.model)))
        return float(steps)

    monkeypatch.setattr(ReferenceStep, "median_seconds", fake_seconds)
    measure = make_yardstick(device(asynchronous=False), machine(), torch.device("cpu"))
    assert measure() == measure() == (16.0, 16.0)
    assert num_moe_layers == [0, 2, 0, 2]


def test_references_have_many_rows_on_a_gpu_and_few_on_a_cpu() -> None:
    """More rows than torch sorts, or sums gradients of an embedding for, in one kernel."""
    for model in REFERENCE_MODELS:
        config, batch = model.config(on_gpu=True)
        tokens = batch * max(1, config.model.sequence_length or 0)
        assert tokens >= 4096
        assert model.config(on_gpu=False)[1] == 2
        assert isinstance(load_task(config).build_model(), nn.Module)


# --- large steps


def large_step(slowdown: float, operation_s: float = 0.0) -> LargeStep:
    predicted = predict(OPS, Machine(device(operation_s=operation_s)))
    return LargeStep("a step", OPS, predicted, slowdown * predicted.step_seconds)


def test_the_slowdown_is_the_geometric_mean_over_the_steps() -> None:
    assert sustained_slowdown([large_step(1.1), large_step(1.1)]) == pytest.approx(1.1)
    assert sustained_slowdown([large_step(1.0), large_step(1.21)]) == pytest.approx(1.1)
    assert sustained_slowdown([]) == 1.0


def test_a_step_that_the_host_limits_shows_no_slowdown_of_the_device() -> None:
    assert large_step(1.1).is_device_bound
    assert not large_step(1.1, operation_s=1.0).is_device_bound


def test_the_slowdown_applies_to_all_work_of_the_device_and_none_of_the_host() -> None:
    ops = replace(OPS, parameters=1000)
    parallelism = Parallelism(micro_batches=2, imbalance=1.5)
    costs = device(optimizer=device().moves["plain"])
    plain = predict(ops, Machine(costs), parallelism)
    slowed = predict(ops, Machine(replace(costs, sustained=2.0)), parallelism)
    assert slowed.step_seconds == pytest.approx(2 * plain.step_seconds)
    assert slowed.host_seconds == plain.host_seconds


@pytest.mark.parametrize("model", LARGE_MODELS)
def test_large_steps_are_far_from_host_bound(model: LargeModel) -> None:
    """They have more arithmetic than a PFLOP/s does in 40 µs per operation, and no launches from
    Python."""
    config, batch = model.config()
    assert batch * model.context == model.tokens
    ops = trace_micro_batch(load_task(config), batch, TraceOptions(True, model.precision, False))
    flops_per_s = 1e15 if model.precision == "bf16" else 0.5e15
    assert ops.flops / flops_per_s > 40e-6 * ops.operations / 2
    assert ops.launches == 0


def test_large_steps_are_run_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny models on a CPU."""
    tiny = (LargeModel(16, 8, "fp32", 1, 32, 64), LargeModel(16, 8, "bf16", 1, 32, 64))
    monkeypatch.setattr(whole_steps, "LARGE_MODELS", tiny)
    costs = device(products={**device().products, "tf32": device().products["fp32"]})
    sustained, references = with_sustained(costs, machine(gpu()), torch.device("cpu"))
    (reference,) = references  # the device has fp32 only
    assert reference.fitted_s == pytest.approx(reference.measured_s)
    assert sustained.sustained > 0
    assert sustained.sustained != 1.0
