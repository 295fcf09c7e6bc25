"""Tests of whole runs through the Python API: failures, interruption, resuming, compilation, memory."""

from __future__ import annotations

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

from orchestrator import Callback, Config, Metric, Trainer
from orchestrator.errors import TaskFailed, TrainingFailed, UserError
from orchestrator.record.callback_values import StepInfo
from orchestrator.record.events import by_step, of_kind
from tests.test_trainer import blobs, cross_entropy, events_of, settings, trainer

# Failures


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
    assert lines[0] == "ValueError: broken file 40.png"
    assert "test_trainer_runs.py" in lines[-2]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_full_disk_is_a_warning_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.train.checkpoint import store

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


def test_a_tracker_that_fails_is_a_warning_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.record import tracker_backends

    def fail(*_: Any) -> Any:
        raise RuntimeError("no tracker today")

    monkeypatch.setitem(tracker_backends.FACTORIES, "tensorboard", fail)  # pyright: ignore[reportArgumentType]
    result = trainer(settings(tmp_path, trackers=("tensorboard",), monitor_gpu=True), blobs(64)).fit()
    events = events_of(tmp_path)
    assert result.status == "completed"
    assert any("no tracker today" in event["message"] for event in of_kind(events, "warning"))
    # The run is shorter than the monitor's interval, and still has a sample.
    assert of_kind(events, "monitor")[-1]["host"]["process_memory"] > 0


def test_sigint_writes_a_checkpoint_and_exits_130(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--epochs", "5000", "--trackers"]
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


# Memory and batches


def test_a_step_repeated_after_out_of_memory_updates_batch_norm_once(tmp_path: Path) -> None:
    def num_batches_tracked(with_failure: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        is_training = False
        num_failures = 0

        def failing_loss(model: nn.Module, batch: Any) -> torch.Tensor:
            nonlocal num_failures
            loss = cross_entropy(model, batch)
            is_real_step = is_training and model.training and batch[0].device.type == "cpu"
            if with_failure and is_real_step and len(batch[0]) == 16 and not num_failures:
                num_failures += 1
                raise torch.OutOfMemoryError("injected")
            return loss

        config = settings(tmp_path / str(with_failure), epochs=1)
        own = trainer(config, blobs(64), failing_loss, model)
        prepared = own.prepare()
        is_training = True
        own._run_in_process(prepared)
        assert num_failures == with_failure
        return int(model[1].num_batches_tracked)  # pyright: ignore[reportArgumentType]

    assert num_batches_tracked(False) == 4
    assert num_batches_tracked(True) == 8, "four steps in two halves each, without the failed attempt"


def test_an_evaluation_that_does_not_fit_is_done_in_halves(tmp_path: Path) -> None:
    def tight_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training and len(batch[0]) > 5:
            raise torch.OutOfMemoryError("injected")
        return cross_entropy(model, batch)

    means = []
    for name, loss in (("plain", cross_entropy), ("tight", tight_loss)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        config = settings(tmp_path / name, epochs=1)
        result = trainer(config, loss=loss, model=model, validation=blobs(23, 1)).fit()
        means.append(result.summary["validation"]["loss"])
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def test_another_batch_size_on_resume_moves_the_end_of_the_schedule(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=2, batch_size=16, max_steps=4), blobs(64)).fit()
    later = settings(tmp_path, epochs=2, batch_size=8, resume="auto", max_steps=None)
    trainer(later, blobs(64)).fit()
    events = events_of(tmp_path)
    steps = by_step(events)
    assert len(steps) == 4 + 8
    assert of_kind(events, "start")[-1]["total_steps"] == 12
    assert steps[-1]["lr"] < 0.2 * max(step["lr"] for step in steps)


def test_batch_size_auto_on_a_cpu_is_measured_once(tmp_path: Path) -> None:
    def batch_choice() -> dict[str, Any]:
        return json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]["batch_size"]

    config = settings(tmp_path, batch_size="auto", max_steps=2)
    trainer(config, blobs(512)).fit()
    first = batch_choice()
    assert "measured throughput" in first["reason"]
    assert 1 <= first["value"] <= 64, "at most an eighth of the data"
    trainer(config.but(resume="auto", max_steps=4), blobs(512)).fit()
    resumed = batch_choice()
    assert resumed["value"] == first["value"]
    assert resumed["reason"] == "measured when the run was first started"
    assert resumed["rejected"] == []


def test_activation_checkpointing_keeps_the_losses(tmp_path: Path) -> None:
    losses = []
    for switch in ("off", "on"):
        config = settings(
            tmp_path / switch,
            epochs=2,
            batch_size=None,
            activation_checkpointing=switch,
            width=16,
            expert_hidden_size=(8,),
        )
        Trainer(config=config, quiet=True).fit()
        losses.append([step["loss"] for step in by_step(events_of(tmp_path / switch))])
    assert losses[0] == losses[1]


# Compilation and profiling


def test_a_compiler_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is repeated without the compiler, and the run says so."""

    def failing_backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_function(call, backend=failing_backend))
    result = trainer(settings(tmp_path, compile=True), blobs(64)).fit()
    assert result.status == "completed"
    (event,) = of_kind(events_of(tmp_path), "compile")
    assert event["status"] == "failed"
    assert "no compiler here" in event["detail"]


def test_modules_of_torch_itself_are_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def counting_backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_function(call, backend=counting_backend))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    trainer(settings(tmp_path, compile=True), blobs(64), model=model).fit()
    assert graphs
    (event,) = of_kind(events_of(tmp_path), "compile")
    assert event["status"] == "compiled"


def test_a_profile_is_a_trace_and_a_table(tmp_path: Path) -> None:
    trainer(settings(tmp_path, profile=True), blobs(200)).fit()
    assert "traceEvents" in json.loads((tmp_path / "run" / "trace.json").read_text())
    assert "addmm" in (tmp_path / "run" / "profile.txt").read_text()


# Resuming


def test_resume_never_chooses_a_run_by_the_name_of_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(settings(tmp_path, run_dir=None, epochs=1)).fit()
    (run,) = (tmp_path / "results").iterdir()
    other = trainer(settings(tmp_path, run_dir=None, epochs=2, resume="auto"), blobs(64, seed=7))
    with pytest.raises(UserError, match=rf"named folder.*the newest of this task: .*{run.name}"):
        other.fit()
    assert list((tmp_path / "results").iterdir()) == [run]


def test_a_resumed_trainer_keeps_the_settings_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(settings(tmp_path, learning_rate=1e-4, schedule="constant", warmup_steps=0, max_steps=2)).fit()
    later = Config.of(run_dir=tmp_path / "run", resume="auto", max_steps=4, trackers=())
    Trainer(nn.Linear(4, 3), data=blobs(64), loss=cross_entropy, config=later).fit()
    events = events_of(tmp_path)
    assert [step["lr"] for step in by_step(events)] == [1e-4] * 4
    output = capsys.readouterr().out
    assert f"resuming with the settings of {tmp_path / 'run' / 'config.yaml'}" in output.replace("\n", "")
    assert "resumed at step 2" in output
    (event,) = of_kind(events, "settings")
    assert [change["name"] for change in event["changes"]] == ["max_steps", "training samples"]
    assert [change["origin"] for change in event["changes"]] == ["Config", "the task's data"]


def test_other_data_of_the_same_size_is_told(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=1)).fit()
    trainer(settings(tmp_path, epochs=2, resume="auto"), blobs(32, seed=1)).fit()
    (event,) = of_kind(events_of(tmp_path), "settings")
    assert [change["name"] for change in event["changes"]] == [
        "epochs",
        "the hash of the first training samples",
    ]


def test_a_given_default_wins_over_the_folder(tmp_path: Path) -> None:
    trainer(settings(tmp_path, learning_rate=1e-4, epochs=1)).fit()
    default = 3e-3
    trainer(settings(tmp_path, learning_rate=default, epochs=2, resume="auto")).fit()
    (event,) = of_kind(events_of(tmp_path), "settings")
    changed = {change["name"]: (change["before"], change["now"]) for change in event["changes"]}
    assert changed == {"epochs": (1, 2), "learning_rate": (1e-4, default)}


def test_another_model_is_refused_by_its_structure(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=1)).fit()
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    wider = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"has another model \(15 parameters before, 67 now\)"):
        trainer(settings(tmp_path, epochs=2, resume="auto"), model=wider).fit()
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == files


def test_a_setting_kept_without_its_secret_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "abracadabra")
    trainer(settings(tmp_path, epochs=1, data_dir="/data/abracadabra")).fit()
    with pytest.raises(
        UserError, match="keeps data_dir without the secret in it; give it again, as --data-dir"
    ):
        trainer(settings(tmp_path, epochs=2, resume="auto")).fit()
    trainer(settings(tmp_path, epochs=2, resume="auto", data_dir="/data/abracadabra")).fit()
    assert not (tmp_path / "run" / "config.002.yaml").exists()


# Directions of metrics


def churn_loss(model: nn.Module, batch: Any) -> Any:
    """The metrics fall with the loss; the best result is the smallest."""
    loss_sum = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    value = loss_sum.detach()
    return loss_sum, len(batch[1]), {"mae": value, "churn": value}


@pytest.mark.parametrize(
    ("metric", "parts"),
    [
        ("mae", {}),
        ("churn:min", {}),
        ("churn", {"metrics": {"churn": Metric(mode="min")}}),
    ],
)
def test_the_best_result_follows_the_direction_of_its_metric(
    tmp_path: Path, metric: str, parts: dict[str, Any]
) -> None:
    config = settings(tmp_path, early_stopping_metric=metric, early_stopping_patience=2, learning_rate=0.05)
    result = trainer(config, blobs(64), churn_loss, validation=blobs(64), **parts).fit()
    evaluations = of_kind(events_of(tmp_path), "evaluate")
    name = metric.partition(":")[0]
    assert [event["best"] for event in evaluations] == [True] * 3, "each epoch is better than the last"
    assert result.summary["best"][name] == min(event["metrics"][name] for event in evaluations)
    assert of_kind(events_of(tmp_path), "start")[0]["best_by"] == f"{name}:min"
    assert re.search(
        rf"best {name} .* at step {evaluations[-1]['step']}$", result.performance_summary(), re.M
    )


def test_a_metric_without_a_direction_is_refused_before_training(tmp_path: Path) -> None:
    config = settings(tmp_path, early_stopping_metric="churn")
    with pytest.raises(UserError, match="churn:min or churn:max"):
        trainer(config, loss=churn_loss, validation=blobs(32)).fit()
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="a mapping of names to metrics"):
        trainer(config, loss=churn_loss, metrics={"churn": "min"})


def test_another_metric_on_resume_starts_the_best_result_anew(tmp_path: Path) -> None:
    every_step = {"evaluate_every": 1, "checkpoint_every": 1}
    trainer(settings(tmp_path, epochs=1, **every_step), loss=churn_loss, validation=blobs(32)).fit()
    *_, before = of_kind(events_of(tmp_path), "evaluate")
    later = settings(tmp_path, epochs=2, resume="auto", early_stopping_metric="accuracy")

    def worse_loss(model: nn.Module, batch: Any) -> Any:
        loss_sum, count, metrics = churn_loss(model, batch)
        return loss_sum, count, metrics | {"accuracy": metrics["mae"] * 0.001}

    trainer(later, loss=worse_loss, validation=blobs(32)).fit()
    after = next(
        event for event in of_kind(events_of(tmp_path), "evaluate") if event["step"] > before["step"]
    )
    assert after["metrics"]["accuracy"] < before["loss"], "no better than the best loss, as a number"
    assert after["best"] is True
