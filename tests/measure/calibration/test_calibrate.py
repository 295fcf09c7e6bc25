"""A calibration with few and small sizes: every cost is measured, and predictions can be made from
it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.measure.calibration import calibrate as calibrate_module
from orchestrator.measure.calibration.calibrate import _errors_of, _Progress, calibrate
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


def test_workers_count_as_stuck_only_without_progress() -> None:
    progress = _Progress(now_s=0.0)
    slow = [(used_s, 110.0 * index) for index, used_s in enumerate([1.0, 2.5, 4.0, 1.5, 2.5])]
    assert not any(progress.is_stuck(used_s, now_s) for used_s, now_s in slow)
    assert not progress.is_stuck(used_s=2.9, now_s=440.0 + 119)
    assert progress.is_stuck(used_s=2.9, now_s=440.0 + 121)


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        (
            "import sys; print('the cause', file=sys.stderr); sys.exit(3)",
            "worker 1 .* with code 3: the cause",
        ),
        ("import time; time.sleep(1e6)", "no progress for 0.3 s"),
    ],
)
def test_workers_that_fail_or_hang_are_answered_and_ended(
    monkeypatch: pytest.MonkeyPatch, script: str, answer: str
) -> None:
    """One worker waits for the other."""
    started: list[subprocess.Popen[bytes]] = []

    def start_worker(job: dict[str, Any]) -> subprocess.Popen[bytes]:
        text = script if job["rank"] == 1 else "import time; time.sleep(1e6)"
        with _errors_of(job["rank"], Path(job["folder"])).open("wb") as errors:
            started.append(subprocess.Popen([sys.executable, "-c", text], stderr=errors))
        return started[-1]

    monkeypatch.setattr(calibrate_module, "_start_worker", start_worker)
    monkeypatch.setattr(calibrate_module, "_PROGRESS_S", 1e6)  # not even the start of Python
    monkeypatch.setattr(calibrate_module, "_STUCK_S", 0.3 if "0.3" in answer else 1e6)
    cpu = replace(inventory(), gpus=())
    with pytest.raises(ResourceError, match=answer):
        calibrate(cpu, replace(CalibrationScope.of(cpu, tiny=True), workers=(2,)))
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


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
