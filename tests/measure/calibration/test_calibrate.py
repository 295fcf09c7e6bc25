"""A calibration with few and small sizes: every cost is measured, and predictions can be made from
it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.measure.calibration.calibrate import calibrate
from orchestrator.measure.calibration.device_costs import CalibrationScope
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.calibration import Calibration, read_calibration, write_calibration
from orchestrator.plan.cost.machine import Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MOVES
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.tasks.load import load_task


def calibrated(folder: Path, **changes: Any) -> Calibration:
    """Calibrate the CPU with tiny sizes; the result is also written and read back."""
    cpu = replace(inventory(), gpus=())
    scope = replace(CalibrationScope.of(cpu, tiny=True), **changes)
    progress: list[str] = []
    calibration = calibrate(cpu, scope, progress.append)
    assert progress
    write_calibration(calibration, folder / "calibration.json")
    assert read_calibration(folder / "calibration.json") == calibration
    return calibration


def test_a_calibration_has_all_costs_for_a_prediction(tmp_path: Path) -> None:
    calibration = calibrated(tmp_path, workers=(1,), references=2)
    profile = calibration.profile(1)
    costs = profile.device
    assert set(costs.moves) == set(MOVES)
    assert costs.operation_s + costs.launch_s + costs.view_s + costs.tensor_s + costs.step_s > 0
    assert len(profile.references) == 2
    for reference in profile.references:
        assert reference.operations > 0
        assert reference.measured_s > 0
        assert reference.fitted_s > 0
    ops = trace_micro_batch(load_task(Config.of(task="digits")), 8)
    assert predict(ops, calibration.machine_for(1)[0]).step_seconds > 0


@pytest.mark.slow
def test_several_workers_are_measured_at_once_with_their_links(tmp_path: Path) -> None:
    calibration = calibrated(tmp_path, workers=(1, 2))
    profile = calibration.profile(2)
    assert profile.threads == max(1, inventory().cores // 2)
    assert profile.links is not None
    ops = trace_micro_batch(load_task(Config.of(task="digits")), 8, TraceOptions(hosts=2))
    predicted = predict(ops, calibration.machine_for(2)[0], Parallelism(2, "expert_parallel"))
    assert predicted.parts["exchange"] > 0
    assert predicted.parts["gradients"] > 0
