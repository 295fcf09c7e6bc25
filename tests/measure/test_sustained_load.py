"""Large steps: what they say of a device, and which of them say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orchestrator.measure import sustained_load as module
from orchestrator.measure.step_trace import TraceOptions, trace_step
from orchestrator.measure.sustained_load import LARGE, LargeModel, LargeStep, sustained, with_sustained
from orchestrator.plan.cost.machine import Machine, Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MicroBatchOps, MoveOp, ProductOp
from orchestrator.tasks.load import load_task
from tests.support.cost_machines import device
from tests.support.inventories import gpu, machine

WORK = MicroBatchOps(
    samples=4, products=(ProductOp(100, 200, 50),), moves=(MoveOp("plain", 10**6),), operations=10
)


def seen(times: float, operation_s: float = 0.0) -> LargeStep:
    predicted = predict(WORK, Machine(device(operation_s=operation_s)))
    return LargeStep("a step", WORK, predicted, times * predicted.step_seconds)


def test_the_mean_of_how_much_longer_steps_take() -> None:
    assert sustained([seen(1.1), seen(1.1)]) == pytest.approx(1.1)
    assert sustained([seen(1.0), seen(1.21)]) == pytest.approx(1.1)
    assert sustained([]) == 1.0


def test_a_step_that_the_host_limits_says_nothing_of_the_device() -> None:
    assert seen(1.1).tells
    assert not seen(1.1, operation_s=1.0).tells


def test_a_device_that_is_slower_in_steps_takes_longer_for_all_that_it_does() -> None:
    work, team = replace(WORK, parameters=1000), Parallelism(micro_batches=2, imbalance=1.5)
    figures = device(optimizer=device().moves["plain"])
    once, twice = (predict(work, Machine(replace(figures, sustained=times)), team) for times in (1.0, 2.0))
    assert twice.step_seconds == pytest.approx(2 * once.step_seconds)
    assert twice.host_seconds == once.host_seconds


@pytest.mark.parametrize("large", LARGE)
def test_large_steps_are_far_from_what_a_host_limits(large: LargeModel) -> None:
    """A PFLOP/s for 40 µs an operation: more arithmetic than that. And none of the settings is left to chance."""
    config, batch = large.config()
    assert batch * large.context == large.tokens
    work = trace_step(load_task(config), batch, TraceOptions(True, large.precision, False))
    assert work.flops / (1e15 if large.precision == "bf16" else 0.5e15) > 40e-6 * work.operations / 2
    assert work.launches == 0


def test_large_steps_are_run_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny ones, on a CPU."""
    monkeypatch.setattr(
        module, "LARGE", (LargeModel(16, 8, "fp32", 1, 32, 64), LargeModel(16, 8, "bf16", 1, 32, 64))
    )
    made = device(products={**device().products, "tf32": device().products["fp32"]})
    found, references = with_sustained(made, machine(gpu()), torch.device("cpu"))
    (reference,) = references  # the device computes in fp32 alone
    assert reference.fitted_s == pytest.approx(reference.measured_s)
    assert found.sustained > 0
    assert found.sustained != 1.0
