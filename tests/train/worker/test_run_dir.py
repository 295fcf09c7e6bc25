"""The lines that a run shows at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.train.worker.run_dir import summary_lines

SUMMARY: dict[str, Any] = {
    "status": "completed",
    "steps": 60,
    "reason": "60 steps done",
    "validation": {},
    "best": {},
    "train_loss": 0.5,
    "samples_per_second": 1000.0,
    "units_per_second": 1000.0,
    "unit": "samples",
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "completed: 60 steps, "),
        ({"steps": 1, "reason": "1 step done"}, "completed: 1 step, "),
        ({"reason": "10 epochs done"}, "completed: 60 steps (10 epochs done), "),
        ({"status": "stopped", "reason": "interrupted"}, "stopped: 60 steps (interrupted), "),
    ],
)
def test_the_last_lines_say_the_number_of_steps_once(changes: dict[str, Any], text: str) -> None:
    first, second = summary_lines(SUMMARY | changes, Path("run"))
    assert first == f"{text}training loss 0.5000, 1,000 samples/s"
    assert second == "report: run/report.html"
