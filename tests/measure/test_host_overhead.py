"""The reference steps: enough of them, and different enough, to tell what costs the host how much."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts.balance import moe_layers
from orchestrator.measure.host_overhead import (
    FORMS,
    ReferenceModel,
    ReferenceStep,
    forms_for,
    host_figures,
    yardstick,
)
from orchestrator.measure.step_trace import TraceOptions, trace_step
from orchestrator.measure.timed_steps import submit_seconds
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.load import load_task
from tests.support.cost_machines import device
from tests.support.inventories import machine

GPU = device(products={"bf16": {}, "fp32": {}}, grouped=PiecewiseCurve((32.0, 128.0), (2.0, 1.0)))


def work_of(form: ReferenceModel, on_gpu: bool) -> MicroBatchOps:
    config, batch = form.config(on_gpu)
    return trace_step(load_task(config), batch, TraceOptions(on_gpu, form.precision, True))


def test_a_gpu_computes_in_low_precision_and_dense_models_in_fp32_too() -> None:
    forms = forms_for(GPU)
    assert {form.precision for form in forms if form.experts} == {"bf16"}
    assert {form.precision for form in forms if not form.experts} == {"bf16", "fp32"}
    assert forms_for(device(asynchronous=False)) == FORMS


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_the_host_needs_can_be_told_from_the_reference_steps(on_gpu: bool) -> None:
    """Figures that are put in come out, also with errors of one percent in what is measured."""
    works = [work_of(form, on_gpu) for form in (forms_for(GPU) if on_gpu else FORMS)]
    operation, launch, sort, view, step = truth = (2e-5, 9e-5, 3e-4 if on_gpu else 0.0, 5e-6, 8e-4)
    seconds = [
        w.operations * operation + w.launches * launch + w.sorts * sort + w.views * view + step for w in works
    ]
    assert host_figures(works, seconds) == pytest.approx(truth, rel=1e-6, abs=1e-12)
    noisy = [s * (1 + 0.01 * (-1) ** place) for place, s in enumerate(seconds)]
    found = host_figures(works, noisy)
    assert found[:2] == pytest.approx(truth[:2], rel=0.3)


def test_the_yardstick_times_a_dense_step_and_one_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as on a CPU, each time with steps that are built anew."""
    built: list[int] = []
    monkeypatch.setattr(
        ReferenceStep,
        "seconds",
        lambda _, run, steps: built.append(len(moe_layers(run.model))) or float(steps),
    )
    read = yardstick(device(asynchronous=False), machine(), torch.device("cpu"))
    assert read() == read() == (16.0, 16.0)
    assert built == [0, 2, 0, 2]


def test_each_step_is_handed_to_a_device_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: seen.append("waited"))
    seconds = submit_seconds(lambda step: seen.append(f"step {step}"), 2, 1, torch.device("cuda", 0))
    assert len(seconds) == 2
    assert seen == ["waited", "step 0", "waited", "step 1", "waited", "step 2", "waited"]


def test_many_rows_on_a_gpu_and_few_on_a_cpu() -> None:
    """More rows than torch sorts, or sums gradients of an embedding for, in one kernel."""
    for form in FORMS:
        config, batch = form.config(on_gpu=True)
        tokens = batch * max(1, config.model.context_length or 0)
        assert tokens >= 4096
        assert form.config(on_gpu=False)[1] == 2
        assert isinstance(load_task(config).build_model(), nn.Module)
