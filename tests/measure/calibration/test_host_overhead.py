"""The reference steps are many and different enough to separate the costs of the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts.balance import moe_layers
from harness.fakes.cost_machines import device
from harness.fakes.inventories import machine
from orchestrator.measure.calibration.host_overhead import (
    REFERENCE_MODELS,
    ReferenceModel,
    ReferenceStep,
    fit_host_costs,
    make_yardstick,
    reference_models,
)
from orchestrator.measure.timed_steps import StepRunner
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.load import load_task

GPU = device(products={"bf16": {}, "fp32": {}}, grouped=PiecewiseCurve((32.0, 128.0), (2.0, 1.0)))


def traced(model: ReferenceModel, on_gpu: bool) -> MicroBatchOps:
    config, batch = model.config(on_gpu)
    return trace_micro_batch(load_task(config), batch, TraceOptions(on_gpu, model.precision, True))


def test_a_gpu_runs_references_in_bf16_and_dense_ones_in_fp32_too() -> None:
    models = reference_models(GPU)
    assert {model.precision for model in models if model.experts} == {"bf16"}
    assert {model.precision for model in models if not model.experts} == {"bf16", "fp32"}
    assert reference_models(device(asynchronous=False)) == REFERENCE_MODELS


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
