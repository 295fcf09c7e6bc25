"""Tests of runs that fail or are interrupted: bad data, broken tasks, full disks, trackers, signals."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.runs.blob_trainers import blobs, cross_entropy, events_of, settings, trainer
from harness.runs.records import by_step
from orchestrator import Callback, Loss, Metric, Trainer
from orchestrator.errors import TaskFailed, TrainingFailed, UserError
from orchestrator.live.callbacks.callback_values import StepInfo
from orchestrator.record.files.reading import of_kind
from orchestrator.result import Result
from orchestrator.train.checkpoint.writer import CheckpointWriter


def test_a_diverged_run_fails_and_saves_no_checkpoint_of_it(tmp_path: Path) -> None:
    num_calls = 0

    def exploding_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return cross_entropy(model, batch) * (float("nan") if num_calls > 12 else 1.0)

    config = settings(tmp_path, checkpoint_every=2, log_every=1)
    with pytest.raises(TrainingFailed, match="diverged"):
        trainer(config, blobs(320), exploding_loss).fit()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    events = events_of(tmp_path)
    first_nan = next(step["step"] for step in by_step(events) if step["loss"] == "nan")
    assert max(event["step"] for event in of_kind(events, "checkpoint")) < first_nan


def test_a_loss_that_is_no_number_from_the_start_is_not_called_a_high_learning_rate(tmp_path: Path) -> None:
    def bad_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) * float("nan")

    with pytest.raises(TrainingFailed, match=r"step 1: loss nan.* Look in the model and the loss") as caught:
        trainer(settings(tmp_path), loss=bad_loss).fit()
    assert "Lower --learning-rate" not in str(caught.value)


class BrokenMetric(Metric):
    def __init__(self) -> None:
        super().__init__("min")
        self.add_state("count", torch.zeros(()))

    def update(self, count: int) -> None:
        self.count = self.count + count

    def compute(self) -> float:
        raise ZeroDivisionError("no samples of class 3")


def loss_with_metric(model: nn.Module, batch: Any) -> Loss:
    return Loss(cross_entropy(model, batch) * len(batch[0]), len(batch[0]), {"churn": (len(batch[0]),)})


def test_steps_whose_evaluation_fails_are_not_lost(tmp_path: Path) -> None:
    data = blobs(320)
    validation = blobs(32)
    config = settings(tmp_path, max_steps=5)
    with pytest.raises(TaskFailed, match="no samples of class 3"):
        trainer(
            config, data, loss_with_metric, validation=validation, metrics={"churn": BrokenMetric()}
        ).fit()
    assert [event["step"] for event in of_kind(events_of(tmp_path), "checkpoint")] == [5]
    resumed = trainer(settings(tmp_path, max_steps=5, resume="auto"), data, validation=validation).fit()
    assert resumed.summary["status"] == "completed"
    assert resumed.summary["last"]["step"] == 5
    assert len(by_step(events_of(tmp_path))) == 5, "no step is trained twice"


def test_a_step_that_cannot_be_saved_after_its_evaluation_failed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(CheckpointWriter, "save", full_disk)
    config = settings(tmp_path, max_steps=5)
    parts = {"validation": blobs(32), "metrics": {"churn": BrokenMetric()}}
    with pytest.raises(TaskFailed, match="no samples of class 3"):
        trainer(config, blobs(320), loss_with_metric, **parts).fit()
    messages = [event["message"] for event in of_kind(events_of(tmp_path), "warning")]
    assert "step 5 could not be saved: no space left" in messages


@pytest.mark.parametrize(("checkpoint_every", "is_saved"), [(2, True), (1000, False)])
def test_a_failed_run_shows_how_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint_every: int, is_saved: bool
) -> None:
    num_calls = 0

    def failing_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 12:
            raise ValueError("the drive is gone")
        return cross_entropy(model, batch)

    config = settings(tmp_path, checkpoint_every=checkpoint_every)
    loud = Trainer(nn.Linear(4, 3), data=blobs(320), loss=failing_loss, config=config)
    with pytest.raises(TaskFailed, match="the drive is gone"):
        loud.fit()
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert bool(saved) == is_saved
    shown = capsys.readouterr().out.replace("\n", " ")
    assert ("continue with: Trainer(..., config=Config.of(resume='auto', run_dir=" in shown) == is_saved
    if is_saved:
        step = int(saved[-1].removeprefix("step_"))
        assert f"the newest checkpoint is of step {step}; when the cause is removed" in shown


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
@pytest.mark.parametrize("loaded", [False, True])
def test_bad_input_is_named_and_not_called_a_high_learning_rate(
    tmp_path: Path, value: float, word: str, loaded: bool
) -> None:
    inputs, labels = blobs(64)
    inputs = inputs.clone()
    inputs[41, 1] = value
    data: Any = list(zip(inputs, labels, strict=True)) if loaded else (inputs, labels)
    with pytest.raises(TrainingFailed) as caught:
        trainer(settings(tmp_path, log_every=3), data).fit()
    assert f"training sample 41 has {word} in field 0. Clean the data" in str(caught.value)
    assert "learning-rate" not in str(caught.value)


@pytest.mark.parametrize(("sample", "epochs"), [(17, 1), (None, 2)])
def test_a_validation_loss_that_is_no_number_is_explained_once(
    tmp_path: Path, sample: int | None, epochs: int
) -> None:
    inputs, labels = blobs(40)
    inputs = inputs.clone()
    if sample is not None:
        inputs[sample, 1] = float("nan")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scale = float("nan") if not model.training and sample is None else 1.0
        return cross_entropy(model, batch) * scale

    trainer(settings(tmp_path, epochs=epochs), blobs(64), loss, validation=(inputs, labels)).fit()
    (warning,) = of_kind(events_of(tmp_path), "warning")
    cause = (
        "validation sample 17 has NaN in field 0. Clean the data, or leave the sample out"
        if sample is not None
        else "the first 40 validation samples are finite, but the model's loss of them is not"
    )
    assert warning["message"] == f"step 4: validation loss nan: {cause}"


def test_a_tracker_that_cannot_start_is_refused_before_there_is_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    with pytest.raises(UserError, match="the tracker wandb found no API key"):
        trainer(settings(tmp_path, trackers=("wandb",))).fit()
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_loader_process_is_reported_like_any_other(tmp_path: Path) -> None:
    class BrokenData:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            if index == 40:
                raise ValueError("broken file 40.png")
            return torch.zeros(4), 0

    with pytest.raises(TaskFailed) as caught:
        trainer(settings(tmp_path, loader_workers=2), BrokenData()).fit()
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["ValueError: broken file 40.png", "  while reading sample 40 for the training"]
    assert "test_trainer_failures.py" in lines[-2]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_full_disk_is_a_warning_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.checkpoint import store

    write_manifest = store.write_manifest
    num_calls = 0

    def fail_once(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise OSError(28, "No space left on device")
        write_manifest(*arguments)

    monkeypatch.setattr(store, "write_manifest", fail_once)
    result = trainer(settings(tmp_path, epochs=2)).fit()
    assert result.status == "completed"
    (warning,) = of_kind(events_of(tmp_path), "warning")
    assert "No space left" in warning["message"]


def test_a_full_disk_costs_the_record_but_not_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(folder: str) -> Result:
        torch.manual_seed(0)
        return trainer(settings(tmp_path / folder, epochs=3)).fit()

    expected = fit("expected")
    write = os.write
    num_writes = 0

    def limited(file: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += b'"event"' in data
        if num_writes > 3 and b'"event"' in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr("orchestrator.record.files.event_log.os.write", limited)
    monkeypatch.setattr("orchestrator.report.run.page.draw_report", full)
    result = fit("run")
    assert expected.not_written == ""
    assert "events of events.jsonl, the report (No space left on device)" in result.not_written
    assert "orchestrator report" in result.not_written
    assert 0 < len(events_of(tmp_path / "run")) < len(events_of(tmp_path / "expected"))
    same = ("status", "steps", "epochs", "train_loss", "final")
    assert {name: result.summary[name] for name in same} == {name: expected.summary[name] for name in same}


def test_a_tracker_that_fails_is_a_warning_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.live.trackers import tracker_backends

    def fail(*_: Any) -> Any:
        raise RuntimeError("no tracker today")

    monkeypatch.setitem(tracker_backends.FACTORIES, "tensorboard", fail)
    result = trainer(settings(tmp_path, trackers=("tensorboard",), monitor_gpu=True), blobs(64)).fit()
    events = events_of(tmp_path)
    assert result.status == "completed"
    assert any("no tracker today" in event["message"] for event in of_kind(events, "warning"))
    # The run is shorter than the monitor's interval, and still has a sample.
    assert of_kind(events, "monitor")[-1]["host"]["process_memory"] > 0


def test_sigint_writes_a_checkpoint_and_exits_130(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--epochs", "5000", "--trackers", "--plots", "off"]
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "train", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    while process.poll() is None and len(of_kind(events_of(tmp_path), "step")) < 5:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"continue with: orchestrator resume {tmp_path / 'run'}" in output
    events = events_of(tmp_path)
    assert of_kind(events, "end")[0]["status"] == "stopped"
    assert of_kind(events, "checkpoint")[-1]["step"] == by_step(events)[-1]["step"]


def test_an_interrupted_fit_names_the_call_that_continues_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupt(Callback):
        def on_step(self, step: StepInfo) -> None:
            if step.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    def fitting(*callbacks: Callback, **given: Any) -> Trainer:
        config = settings(tmp_path, log_every=1, max_steps=8, **given)
        return Trainer(
            nn.Linear(4, 3), data=blobs(64), loss=cross_entropy, callbacks=callbacks, config=config
        )

    assert fitting(Interrupt()).fit().status == "stopped"
    call = f"Trainer(..., config=Config.of(resume='auto', run_dir='{tmp_path / 'run'}')).fit()"
    assert capsys.readouterr().out.endswith(f"continue with: {call}\n")
    with pytest.raises(UserError, match=re.escape(f"holds a run already; continue it with {call}, or")):
        fitting().fit()
    assert fitting(resume="auto").fit().status == "completed"
