"""Large steps: the slowdown that they show, and the steps that show none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.fakes.cost_machines import device
from harness.fakes.inventories import gpu, machine
from orchestrator.measure.calibration import sustained_load
from orchestrator.measure.calibration.sustained_load import (
    LARGE_MODELS,
    LargeModel,
    LargeStep,
    sustained_slowdown,
    with_sustained,
)
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.machine import Machine, Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MicroBatchOps, MoveOp, ProductOp
from orchestrator.tasks.load import load_task

OPS = MicroBatchOps(
    samples=4, products=(ProductOp(100, 200, 50),), moves=(MoveOp("plain", 10**6),), operations=10
)


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
    monkeypatch.setattr(sustained_load, "LARGE_MODELS", tiny)
    costs = device(products={**device().products, "tf32": device().products["fp32"]})
    sustained, references = with_sustained(costs, machine(gpu()), torch.device("cpu"))
    (reference,) = references  # the device has fp32 only
    assert reference.fitted_s == pytest.approx(reference.measured_s)
    assert sustained.sustained > 0
    assert sustained.sustained != 1.0
