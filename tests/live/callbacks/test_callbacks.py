"""Tests of callbacks: their values, their requests, and their errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runs.records import made
from orchestrator.config.settings import Config
from orchestrator.errors import TaskFailed, UserError
from orchestrator.live.callbacks.callback_values import CheckpointInfo, EvaluationInfo, StepInfo
from orchestrator.live.callbacks.callbacks import Callback, CallbackRunner, Request, load_callbacks
from orchestrator.record.events.decoding import to_json

STEP = {
    "event": "step",
    "step": 3,
    "epoch": 0,
    "loss": 0.5,
    "grad_norm": "inf",
    "lr": 1e-3,
    "samples": 4,
    "units": 4,
    "seconds": 0.1,
    "metrics": {"accuracy": 0.25},
}
END = {"event": "end", "status": "completed", "reason": "3 steps done", "steps": 3, "seconds": 1.0}
START = {
    "event": "start",
    "step": 0,
    "total_steps": 9,
    "strategy": "single",
    "workers": 1,
    "device": "cpu",
    "precision": "fp32",
    "global_batch_size": 4,
    "parameters": 7,
}


class Seen(Callback):
    """Keeps the values it sees, and answers each step with ``answer``."""

    def __init__(self, answer: Any = None) -> None:
        self.values: list[Any] = []
        self.answer = answer

    def on_start(self, start: Any) -> None:
        self.values.append(start)

    def on_step(self, step: StepInfo) -> Any:
        self.values.append(step)
        return self.answer

    def on_checkpoint(self, checkpoint: Any) -> None:
        self.values.append(checkpoint)


class Failing(Callback):
    def on_step(self, step: StepInfo) -> None:
        raise ZeroDivisionError(f"my own mistake at step {step.step}")


def runner_of(
    *callbacks: Any, raise_errors: bool = False, folder: Path = Path("run")
) -> tuple[CallbackRunner, list[dict[str, Any]]]:
    """Return a runner, and the events that it writes."""
    written: list[dict[str, Any]] = []
    runner = CallbackRunner(callbacks, raise_errors)
    runner.bind(folder, Config(), lambda event: written.append(to_json(event)))
    return runner, written


def test_values_are_frozen_and_hold_the_figures_of_the_event() -> None:
    seen = Seen()
    runner, _ = runner_of(seen)
    runner(made(STEP))
    (value,) = seen.values
    assert (value.step, value.loss, value.grad_norm) == (3, 0.5, float("inf"))
    assert value.metrics == {"accuracy": 0.25}
    with pytest.raises(FrozenInstanceError):
        value.step = 4
    with pytest.raises(TypeError):
        value.metrics["accuracy"] = 1.0


def test_a_checkpoint_is_named_by_its_whole_path(tmp_path: Path) -> None:
    seen = Seen()
    runner, _ = runner_of(seen, folder=tmp_path)
    fields = {"step": 3, "path": "checkpoints/step_00000003", "bytes": 9, "seconds": 0.5, "stall": 0.1}
    runner(made({"event": "checkpoint", **fields}))
    assert seen.values == [CheckpointInfo(3, tmp_path / "checkpoints" / "step_00000003", 9, 0.5)]


def test_restarted_workers_do_not_start_the_run_again() -> None:
    seen = Seen()
    runner, _ = runner_of(seen)
    runner(made(START))
    runner(made(STEP))
    runner(made({**START, "step": 2}))
    assert [type(value).__name__ for value in seen.values] == ["StartInfo", "StepInfo"]
    assert seen.values[0].config == Config()


def test_a_figure_that_a_step_lacks_is_nan() -> None:
    seen = Seen()
    runner, _ = runner_of(seen)
    runner(made({**STEP, "grad_norm": None}))
    assert math.isnan(seen.values[0].grad_norm)


def test_requests_are_collected() -> None:
    answer = Request(stop="good enough", save=True, log={"ratio": 2})
    runner, written = runner_of(Seen(answer), Seen())
    assert (runner.stop_reason, runner.take_save()) == (None, False)
    runner(made(STEP))
    assert runner.stop_reason == "Seen.on_step asked to stop: good enough"
    assert [runner.take_save(), runner.take_save()] == [True, False]
    assert written == [{"event": "log", "step": 3, "values": {"ratio": 2.0}}]
    runner(made(STEP))
    assert runner.num_saves == 2


def test_an_error_is_reported_once_and_counted_and_the_others_are_called() -> None:
    seen = Seen()
    runner, written = runner_of(Failing(), seen)
    runner(made(STEP))
    runner(made({**STEP, "step": 4}))
    runner.check()
    assert [value.step for value in seen.values] == [3, 4]
    (warning,) = written
    assert warning["kind"] == "callback"
    assert "ZeroDivisionError: my own mistake at step 3" in warning["message"]
    assert "while running the callback Failing.on_step" in warning["message"]
    assert "test_callbacks.py" in warning["message"]
    runner(made(END))
    assert len(written) == 2
    assert written[1]["message"] == "the callback Failing.on_step failed 2 times"


def test_an_error_ends_the_run_if_asked() -> None:
    runner, written = runner_of(Failing(), raise_errors=True)
    runner(made(STEP))
    with pytest.raises(TaskFailed, match="my own mistake at step 3"):
        runner.check()
    runner.check()
    assert not written


def test_a_wrong_answer_is_an_error_of_the_callback() -> None:
    runner, written = runner_of(Seen(answer=True))
    runner(made(STEP))
    assert "Seen.on_step returned True; a Request or None was needed" in written[0]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": True}, "stop is the reason in words"),
        ({"log": {"x": "many"}}, "'x' is 'many'; a number"),
        ({"log": {"x": True}}, "'x' is True; a number"),
        ({"log": {"x": torch.ones(2)}}, "a number was needed"),
    ],
)
def test_an_impossible_request_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Request(**arguments)


class Misspelt(Callback):
    def on_evaluation(self, evaluation: EvaluationInfo) -> None:
        """Never called: the method is on_evaluate."""


def test_objects_that_no_hook_reaches_are_refused() -> None:
    with pytest.raises(UserError, match=r"has 'on_evaluation' \(did you mean 'on_evaluate'\?\)"):
        load_callbacks(Config(), [Misspelt()])
    with pytest.raises(UserError, match="object has no method of a callback"):
        load_callbacks(Config(), [object()])
    with pytest.raises(UserError, match=r"the class Seen; give an object: Seen\(\)"):
        load_callbacks(Config(), [Seen])


MODULE = """
class Named:
    def __init__(self, config):
        self.seed = config.run.seed

    def on_end(self, end):
        pass
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_callbacks.py").write_text(MODULE)
    yield
    sys.modules.pop("my_callbacks", None)


@pytest.mark.usefixtures("user_module")
def test_a_callback_is_loaded_by_its_name() -> None:
    config = Config.of(callbacks="my_callbacks:Named", seed=5)
    given = Seen()
    first, second = load_callbacks(config, [given])
    assert first is given
    assert second.seed == 5


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_callbacks:Name", r"callback 'my_callbacks:Name': module my_callbacks has no 'Name'.*'Named'"),
        ("my_callback:Named", "there is no module 'my_callback'"),
        ("my_callbacks.py", "is no name of a callback; write package.module:Name"),
    ],
)
def test_a_misspelt_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_callbacks(Config.of(callbacks=name))
