"""Measuring, on a grid of few and small sizes: every figure is there, and can be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.measure.calibrate import CalibrationScope, calibrate
from orchestrator.measure.fit import fitted_link, not_negative
from orchestrator.measure.op_times import TINY, product_grids
from orchestrator.measure.step_trace import TraceOptions, trace_step
from orchestrator.measure.timer import Timer
from orchestrator.plan.cost.calibration import Calibration, read_calibration, write_calibration
from orchestrator.plan.cost.machine import Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MOVES
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.tasks.load import load_task


def kept(asked: CalibrationScope, folder: Path) -> Calibration:
    """A calibration that was made, written and read back."""
    heard: list[str] = []
    made = calibrate(replace(inventory(), gpus=()), asked, heard.append)
    assert heard
    write_calibration(made, folder / "calibration.json")
    assert read_calibration(folder / "calibration.json") == made
    return made


def tiny(**changes: Any) -> CalibrationScope:
    return replace(CalibrationScope.of(replace(inventory(), gpus=()), tiny=True), **changes)


def test_a_calibration_can_be_predicted_from(tmp_path: Path) -> None:
    made = kept(tiny(workers=(1,), references=2), tmp_path)
    alone = made.profile(1).device
    assert set(alone.moves) == set(MOVES)
    assert alone.operation_s + alone.launch_s + alone.view_s + alone.tensor_s + alone.step_s > 0
    assert [
        reference.operations > 0 and reference.measured_s > 0 and reference.fitted_s > 0
        for reference in made.profile(1).references
    ] == [
        True,
        True,
    ]
    work = trace_step(load_task(Config.of(task="digits")), 8)
    assert predict(work, made.machine_for(1)[0]).step_seconds > 0


@pytest.mark.slow
def test_workers_measure_together(tmp_path: Path) -> None:
    made = kept(tiny(workers=(1, 2)), tmp_path)
    assert made.profile(2).threads == max(1, inventory().cores // 2)
    assert made.profile(2).links is not None
    work = trace_step(load_task(Config.of(task="digits")), 8, TraceOptions(hosts=2))
    several = predict(work, made.machine_for(2)[0], Parallelism(2, "expert_parallel"))
    assert several.parts["exchange"] > 0
    assert several.parts["gradients"] > 0


def test_larger_products_take_longer() -> None:
    for grid in product_grids(
        Timer(torch.device("cpu"), 0.001), replace(TINY, m=(8, 512), k=(16, 512), n=(16, 512)), "fp32"
    ).values():
        assert grid.at(512, 512, 512) > grid.at(8, 16, 16)


def test_products_too_large_to_be_measured_are_reckoned() -> None:
    sizes = replace(TINY, m=(8, 1024), k=(16, 1024), n=(16, 1024), largest_flops=1e8)
    grid = product_grids(Timer(torch.device("cpu"), 0.001), sizes, "fp32")["nn"]
    assert grid.at(1024, 1024, 1024) > 8 * grid.at(1024, 1024, 16)


def test_a_link_is_fitted() -> None:
    sizes = (2**10, 2**17, 2**23)
    link = fitted_link("shared memory", {size: 1e-4 + size / 2e9 for size in sizes})
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((1e-4, 2e9), rel=1e-6)


def test_no_figure_below_zero() -> None:
    rows = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 1.0]])
    assert not_negative(rows, rows @ np.array([2.0, 1.0])) == pytest.approx([2.0, 1.0])
    found = not_negative(rows, np.array([0.5, 2.0, 3.2]))
    assert min(found) >= 0
    assert found[1] == 0.0
