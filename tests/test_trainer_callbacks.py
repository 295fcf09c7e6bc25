"""Tests of callbacks in runs of one process."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.runs.loop_runs import SMALL, losses_in
from orchestrator import Callback, Config, Request, Trainer
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.errors import TaskFailed, UserError
from orchestrator.live.callbacks.callback_values import (
    EndInfo,
    EvaluationInfo,
    ModelInfo,
    StartInfo,
    StepInfo,
)
from orchestrator.record.files.reading import of_kind, read_events


def settings(run_dir: Path, **more: Any) -> Config:
    quick = {"run_dir": run_dir, "max_steps": 6, "trackers": (), "monitor_gpu": False}
    return Config.of(**SMALL | quick | more)


class Journal(Callback):
    """Keeps the names of its calls with their steps."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_start(self, start: StartInfo) -> None:
        self.calls.append(("start", start.step))

    def on_step(self, step: StepInfo) -> None:
        self.calls.append(("step", step.step))

    def on_evaluate(self, evaluation: EvaluationInfo) -> None:
        self.calls.append(("evaluate", evaluation.step))

    def on_checkpoint(self, checkpoint: Any) -> None:
        assert checkpoint.path.is_dir()
        self.calls.append(("checkpoint", checkpoint.step))

    def on_failure(self, failure: Any) -> None:
        self.calls.append(("failure", failure.step))

    def on_end(self, end: EndInfo) -> None:
        self.calls.append((end.status, end.steps))


class StopAtEvaluation(Callback):
    def on_evaluate(self, evaluation: EvaluationInfo) -> Request:
        return Request(stop=f"seen {evaluation.samples} samples", log={"seen": evaluation.samples})


class SaveAtStep(Callback):
    def on_step(self, step: StepInfo) -> Request | None:
        return Request(save=True) if step.step == 2 else None


class Failing(Callback):
    def on_step(self, step: StepInfo) -> None:
        raise ZeroDivisionError(f"at step {step.step}")


def test_a_run_calls_every_hook_in_order(tmp_path: Path) -> None:
    journal = Journal()
    config = settings(tmp_path / "run", evaluate_every=3)
    Trainer(callbacks=[journal], config=config, quiet=True).fit()
    assert [call for call in journal.calls if call[0] != "checkpoint"] == [
        ("start", 0),
        *[("step", step) for step in (1, 2, 3)],
        ("evaluate", 3),
        *[("step", step) for step in (4, 5, 6)],
        ("evaluate", 6),
        ("completed", 6),
    ]
    assert ("checkpoint", 6) in journal.calls


@pytest.mark.extended
@pytest.mark.parametrize("evaluate_every", [0, 2])
def test_a_stop_asked_for_at_an_evaluation_takes_effect_there(tmp_path: Path, evaluate_every: int) -> None:
    config = settings(tmp_path / "run", max_steps=500, evaluate_every=evaluate_every)
    result = Trainer(callbacks=[StopAtEvaluation()], config=config, quiet=True).fit()
    events = read_events(tmp_path / "run" / "events.jsonl")
    (evaluation,) = of_kind(events, "evaluate")
    assert result.status == "completed"
    assert result.summary["steps"] == evaluation["step"] == (evaluate_every or 450)
    assert result.summary["reason"] == "StopAtEvaluation.on_evaluate asked to stop: seen 359 samples"
    (logged,) = of_kind(events, "log")
    assert logged["values"] == {"seen": 359.0}
    assert of_kind(events, "checkpoint")[-1]["step"] == evaluation["step"]


def test_a_checkpoint_is_saved_where_a_callback_asks_for_it(tmp_path: Path) -> None:
    Trainer(callbacks=[SaveAtStep()], config=settings(tmp_path / "run"), quiet=True).fit()
    saved = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "checkpoint")
    assert [event["step"] for event in saved] == [2, 6]


def test_an_error_of_a_callback_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Trainer(callbacks=[Failing()], config=settings(tmp_path / "run")).fit()
    assert result.summary["steps"] == 6
    first, last = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "warning")
    assert "ZeroDivisionError: at step 1" in first["message"]
    assert "Failing.on_step failed 6 times" in last["message"]
    assert "ZeroDivisionError: at step 1" in capsys.readouterr().out


def test_an_error_of_a_callback_ends_the_run_if_asked(tmp_path: Path) -> None:
    journal = Journal()
    config = settings(tmp_path / "run", callback_errors="raise")
    with pytest.raises(TaskFailed, match="ZeroDivisionError: at step 1"):
        Trainer(callbacks=[Failing(), journal], config=config, quiet=True).fit()
    assert journal.calls == [("start", 0), ("step", 1), ("failure", 1), ("failed", 1)]


class LookAtModel(Callback):
    """Keeps when it saw the model, with a norm of its weights; and disturbs what a run must not notice."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def on_model(self, moment: ModelInfo, model: nn.Module) -> Request | None:
        assert not model.training
        assert not torch.is_grad_enabled()
        self.seen.append((moment.after, moment.step, moment.epoch))
        model.train()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        norm = sum(parameter.square().sum().item() for parameter in model.parameters())
        return Request(log={"norm": norm}, stop="seen enough" if moment.step == 4 else None)


def test_a_callback_sees_the_model_and_a_run_does_not_notice(tmp_path: Path) -> None:
    look = LookAtModel()
    more = {"evaluate_every": 2, "gate_jitter": 0.1, "max_steps": 4}
    result = Trainer(callbacks=[look], config=settings(tmp_path / "run", **more), quiet=True).fit()
    alone = Trainer(config=settings(tmp_path / "alone", **more), quiet=True).fit()
    assert losses_in(tmp_path / "run") == losses_in(tmp_path / "alone")
    assert result.summary["reason"] == "LookAtModel.on_model asked to stop: seen enough"
    assert [seen for seen in look.seen if seen[0] == "step"] == [("step", step, 0) for step in (1, 2, 3, 4)]
    assert [seen for seen in look.seen if seen[0] == "evaluate"] == [("evaluate", 2, 0), ("evaluate", 4, 0)]
    assert ("checkpoint", 4, 0) in look.seen
    last = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "log")[-1]
    expected = sum(parameter.square().sum().item() for parameter in alone.model.parameters())
    assert last["values"]["norm"] == pytest.approx(expected)


class ChangeWeight(Callback):
    def on_model(self, moment: ModelInfo, model: nn.Module) -> None:
        if moment.step == 2:
            next(model.parameters()).mul_(2)


def test_a_callback_that_changes_a_weight_ends_the_run(tmp_path: Path) -> None:
    """Also where errors of callbacks are warnings: no checkpoint may have the changed weight."""
    trainer = Trainer(callbacks=[ChangeWeight()], config=settings(tmp_path / "run"), quiet=True)
    with pytest.raises(UserError, match=r"a callback has changed '.+' of the model in on_model after step 2"):
        trainer.fit()
    assert not of_kind(read_events(tmp_path / "run" / "events.jsonl"), "checkpoint")


class FailingWithModel(Callback):
    def on_model(self, moment: ModelInfo, model: nn.Module) -> None:
        raise ZeroDivisionError(f"{type(model).__name__} after step {moment.step}")


@pytest.mark.parametrize("errors", ["warn", "raise"])
def test_an_error_with_the_model_is_like_any_of_a_callback(tmp_path: Path, errors: str) -> None:
    config = settings(tmp_path / "run", max_steps=3, callback_errors=errors)
    trainer = Trainer(callbacks=[FailingWithModel()], config=config, quiet=True)
    if errors == "raise":
        with pytest.raises(TaskFailed, match="after step 1"):
            trainer.fit()
        return
    assert trainer.fit().summary["steps"] == 3
    first, last = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "warning")
    assert "ZeroDivisionError" in first["message"]
    assert re.search(r"FailingWithModel.on_model failed \d+ times", last["message"])


class FailingAtEnd(Callback):
    def on_end(self, end: EndInfo) -> None:
        raise ZeroDivisionError(f"after {end.steps} steps")


def test_an_error_at_the_end_of_a_run_is_its_status_if_asked(tmp_path: Path) -> None:
    journal = Journal()
    config = settings(tmp_path / "run", callback_errors="raise")
    with pytest.raises(TaskFailed, match="ZeroDivisionError: after 6 steps"):
        Trainer(callbacks=[FailingAtEnd(), journal], config=config, quiet=True).fit()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 6)
    assert "ZeroDivisionError: after 6 steps" in summary["reason"]
    assert [call for call in journal.calls if call[0] in ("completed", "failed")] == [("completed", 6)]
    assert journal.calls[-1] == ("failure", 6)


def test_a_wrong_callback_is_found_before_there_is_a_run_folder(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", callbacks="harness.nothing:Journal")
    with pytest.raises(UserError, match=r"there is no module 'harness\.nothing'"):
        Trainer(config=config, quiet=True).fit()
    with pytest.raises(UserError, match="has no method of a callback"):
        Trainer(callbacks=["Journal"], config=settings(tmp_path / "run"), quiet=True).fit()
    assert not (tmp_path / "run").exists()


def test_a_sweep_with_callbacks_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=[Journal()], config=settings(tmp_path / "run"), quiet=True)
    with pytest.raises(UserError, match="trials of a sweep call no callbacks"):
        trainer.sweep(Sweep(parse_space(["precision=fp32"])))
