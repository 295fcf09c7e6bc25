"""The best result of a run, and early stopping, which a resumed run decides alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.runs.loop_runs import StepCounter, run_loop
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import Loss, Task, TensorData


class ScriptedValidation(Task):
    """A task with given validation losses, by the number of the step."""

    def __init__(self, losses: dict[int, float]) -> None:
        self._losses = losses

    def build_model(self) -> nn.Module:
        return StepCounter()

    def train_data(self) -> TensorData:
        return TensorData(torch.ones(16, 1))

    def validation_data(self) -> TensorData:
        return TensorData(torch.ones(1, 1))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, StepCounter)
        output = model(batch[0]).mean()
        if model.training:
            return output
        return output.detach() * 0 + self._losses[int(model.count)]


LOSSES = {4: 5.0, 8: 6.0, 12: 4.0, 16: 7.0, 20: 7.5, 24: 8.0}
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "epochs": 6,
    "early_stopping_patience": 2,
    "experts": None,
    "expert_hidden_size": (),
}


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("checkpoint_every", [0, 2, 4])
@pytest.mark.parametrize("killed_at", [4, 8, 12, 20])
def test_early_stopping_decides_the_same_after_a_restart(
    tmp_path: Path, checkpoint_every: int, killed_at: int
) -> None:
    settings: dict[str, Any] = SETTINGS | {"checkpoint_every": checkpoint_every}
    task = ScriptedValidation(LOSSES)
    whole, _ = run_loop(tmp_path / "whole", task, **settings)
    assert whole.progress.step == 20
    run_loop(tmp_path / "parts", task, max_steps=killed_at, **settings)
    resumed, _ = run_loop(tmp_path / "parts", task, resume="auto", **settings)
    assert resumed.progress.step == 20
    assert resumed.progress.best_step == 12
    assert resumed.progress.bad_evaluations == 2
    evaluations = of_kind(read_events(tmp_path / "parts" / "events.jsonl"), "evaluate")
    best_steps = [event["step"] for event in evaluations if event["best"]]
    assert best_steps[-1] == 12


class ScriptedAccuracy(ScriptedValidation):
    """Validation losses as scripted, and the same accuracy in every evaluation."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return Loss(super().loss(model, batch), 1, {"accuracy": 0.5})


@pytest.mark.parametrize("max_steps", [24, 8])
def test_of_equal_results_the_one_with_the_smallest_loss_is_the_best(tmp_path: Path, max_steps: int) -> None:
    """Patience follows the metric alone; a restart compares with the loss of the best step, too."""
    settings: dict[str, Any] = SETTINGS | {"early_stopping_metric": "accuracy", "early_stopping_patience": 4}
    task = ScriptedAccuracy({0: 9.0} | LOSSES)  # a run tries its metric before the first step
    run_loop(tmp_path, task, max_steps=max_steps, **settings)
    last, _ = run_loop(tmp_path, task, resume="auto", **settings)
    evaluations = of_kind(read_events(tmp_path / "events.jsonl"), "evaluate")
    assert [event["step"] for event in evaluations if event["best"]] == [4, 12]
    assert (last.progress.best_step, last.progress.best_loss) == (12, 4.0)
    assert (last.progress.step, last.progress.bad_evaluations) == (20, 4)


@pytest.mark.parametrize("evaluate_every", [0, 4])
def test_a_run_that_was_stopped_early_stays_stopped(tmp_path: Path, evaluate_every: int) -> None:
    settings: dict[str, Any] = SETTINGS | {"evaluate_every": evaluate_every}
    run_loop(tmp_path, ScriptedValidation(LOSSES), **settings)
    better_later = ScriptedValidation(LOSSES | {24: 1.0})
    resumed, _ = run_loop(tmp_path, better_later, resume="auto", **settings)
    assert resumed.progress.step == 20
