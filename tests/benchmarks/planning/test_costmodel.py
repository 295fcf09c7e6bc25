"""Predicted against measured steps of one small configuration, with an invented calibration; and the scaling
table of a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning import costmodel, costmodel_cases, costmodel_steps, scaling_table
from benchmarks.planning.costmodel_cases import Case, digits
from harness.fakes.cost_machines import device
from harness.runs.benchmark_runs import run_benchmark, run_main, wrong_figures
from orchestrator.plan.cost.calibration import VERSION, Calibration, Profile, write_calibration

CASE = Case(digits(width=8, experts=2, layers=1), 16)
DECODER = {"width": 32, "layers": 1, "sequence_length": 16, "vocabulary": 64, "samples": 64}


def measure_in_this_process(case: Case, folder: Path) -> tuple[float, float, float]:
    """Run the program of a worker, without a process of its own."""
    job: dict[str, Any] = {"case": vars(case), "steps": 3, "folder": str(folder), "rank": 0}
    run_main(costmodel_steps, json.dumps(job))
    result = json.loads((folder / "0.json").read_text(encoding="utf-8"))
    assert len(result["seconds"]) == 3
    return sum(result["seconds"]) / 3, result["bytes"], result["imbalance"]


def test_a_configuration_is_predicted_and_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    profiles = (Profile(1, 1, device(asynchronous=False)),)
    write_calibration(Calibration(VERSION, "2026-11-15", "a CPU", 1, 1.0, 0.0, profiles), path)
    monkeypatch.setattr(costmodel, "ON_CPU", (CASE, costmodel_cases.ON_CPU[0]))
    monkeypatch.setattr(costmodel, "measure_quietly", lambda case, _: measure_in_this_process(case, tmp_path))
    flags = f"--known --calibration {path} --only 0"
    compared, references = run_benchmark("planning.costmodel", flags, tmp_path)
    assert compared.names == ["1 process"]
    assert compared.cells("configuration") == [CASE.name]
    # Signed errors, and parts of the step that overlap.
    signed = ("configuration", "error", "predicted parts", "predicted MiB", "measured MiB")
    assert wrong_figures(compared, signed) == []
    assert references.names == [], "the invented calibration has no steps of its own"


@pytest.mark.extended
def test_scaling_has_a_row_for_each_number_of_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = {name: settings | DECODER for name, settings in scaling_table.MODELS.items()}
    monkeypatch.setattr(scaling_table, "MODELS", small)
    monkeypatch.setattr(scaling_table, "CLUSTERS", {"8 × L4": scaling_table.CLUSTERS["8 × L4"]})
    shares, details = run_benchmark("planning.costmodel", "--scaling", tmp_path)
    assert shares.names == ["1", "2", "4", "8"]
    assert wrong_figures(shares) == []
    # A model of this size is far from filling eight devices, but each of them has a row.
    assert len(details.rows) == 4 * (len(shares.columns) - 2)
