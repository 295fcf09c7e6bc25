"""The lines that a run shows at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.run.run_dir import summary_lines

SUMMARY: dict[str, Any] = {
    "status": "completed",
    "steps": 60,
    "reason": "60 steps done",
    "validation": {},
    "last": {},
    "best": {},
    "final": {},
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


BEST = {"step": 40, "loss": 0.2}
LAST = {"step": 60, "loss": 0.3}


@pytest.mark.parametrize(
    ("final", "validation", "text"),
    [
        (
            {"step": 40, "weights": "best", "reason": "the best validation loss"},
            {"loss": 0.2},
            "validation loss 0.2000, with the best weights, of step 40, the last had loss 0.3000, ",
        ),
        (
            {"step": 60, "weights": "last", "reason": "set by --keep-last"},
            {"loss": 0.3},
            "validation loss 0.3000, best at step 40: loss 0.2000, "
            "the weights are the last ones (set by --keep-last), ",
        ),
    ],
)
def test_the_last_lines_say_which_weights_were_kept(
    final: dict[str, Any], validation: dict[str, float], text: str
) -> None:
    summary = SUMMARY | {"validation": validation, "last": LAST, "best": BEST, "final": final}
    first, _ = summary_lines(summary, Path("run"))
    assert first == f"completed: 60 steps, {text}1,000 samples/s"


def test_a_run_whose_last_step_is_its_best_says_its_result_once() -> None:
    final = {"step": 60, "weights": "best", "reason": "the best validation loss"}
    summary = SUMMARY | {"validation": {"loss": 0.3}, "last": LAST, "best": LAST, "final": final}
    first, _ = summary_lines(summary, Path("run"))
    assert first == "completed: 60 steps, validation loss 0.3000, 1,000 samples/s"


def test_an_interrupted_run_says_at_which_step_it_was_evaluated() -> None:
    final = {"step": 63, "weights": "last", "reason": "the run can be continued"}
    summary = SUMMARY | {"steps": 63, "validation": {"loss": 0.3}, "last": LAST, "best": LAST, "final": final}
    first, _ = summary_lines(summary | {"status": "stopped", "reason": "interrupted"}, Path("run"))
    assert first == "stopped: 63 steps (interrupted), validation loss 0.3000 (at step 60), 1,000 samples/s"


def test_the_last_lines_have_one_rate_of_samples_and_another_of_tokens() -> None:
    first, _ = summary_lines(SUMMARY | {"units_per_second": 16.0}, Path("run"))
    assert first.endswith(", 1,000 samples/s")
    first, _ = summary_lines(SUMMARY | {"units_per_second": 8000.0, "unit": "tokens"}, Path("run"))
    assert first.endswith(", 1,000 samples/s (8,000 tokens/s)")
