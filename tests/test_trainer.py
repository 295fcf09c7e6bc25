"""The Python API, as the README shows it: a model, data and loss of one's own; notebooks; threads; interruption."""

from __future__ import annotations

import asyncio
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
from torch.nn import functional as F

from orchestrator import Config, Loss, Monitor, Task, TensorData, Trainer
from orchestrator.errors import TaskFailed, TrainingFailed, UserError
from orchestrator.record.events import by_step, of_kind, read_events

ROOT = Path(__file__).resolve().parents[1]


def blobs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 3 * F.one_hot(labels, 4), labels


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def settings(folder: Path, **more: Any) -> Config:
    return Config.of(
        **{"run_dir": folder / "run", "epochs": 3, "batch_size": 16, "trackers": (), "monitor_gpu": False}
        | more
    )


def test_own_model_data_and_loss(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    result = Trainer(
        model,
        data=blobs(200),
        validation=blobs(50, 1),
        loss=loss,
        config=settings(tmp_path, learning_rate=0.1),
        quiet=True,
    ).fit()
    assert result.status == "completed"
    assert result.summary["validation"]["loss"] < 0.7
    assert not torch.equal(before, model.weight)
    assert torch.equal(model.weight, result.model.weight)  # pyright: ignore[reportArgumentType]
    assert re.search(r"^  steps +39$", result.performance_summary(), flags=re.MULTILINE)
    for name in (
        "config.yaml",
        "plan.json",
        "events.jsonl",
        "summary.json",
        "report.html",
        "training_metrics.png",
    ):
        assert (result.run_dir / name).stat().st_size > 0, name


def test_the_mean_of_a_plain_scalar_is_over_all_samples(tmp_path: Path) -> None:
    """A short last micro-batch weighs by its samples: 10 samples as 4 + 4 + 2 are the mean over 10."""
    data = blobs(10)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    expected = float(loss(model, data).detach())
    Trainer(
        model,
        data=data,
        loss=loss,
        config=settings(tmp_path, batch_size=4, global_batch_size=10, epochs=1),
        quiet=True,
    ).fit()
    (step,) = by_step(read_events(tmp_path / "run" / "events.jsonl"))
    assert step["loss"] == pytest.approx(expected, rel=1e-6)


def test_own_optimizer_and_schedule(tmp_path: Path) -> None:
    trainer = Trainer(
        nn.Linear(4, 3),
        data=blobs(64),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        schedule=lambda step: 0.5**step,
        config=settings(tmp_path, epochs=1),
        quiet=True,
    )
    assert not trainer.prepare().plan.fused_optimizer.value
    trainer.fit()
    assert [e["lr"] for e in by_step(read_events(tmp_path / "run" / "events.jsonl"))] == [
        0.5,
        0.25,
        0.125,
        0.0625,
    ]


def test_a_task_class(tmp_path: Path) -> None:
    class Blobs(Task):
        def build_model(self) -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def train_data(self) -> TensorData:
            return TensorData(*blobs(100))

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            logits = model(batch[0])
            return Loss(
                F.cross_entropy(logits, batch[1], reduction="sum"),
                len(logits),
                {"margin": logits.max(-1).values.sum()},
            )

    result = Trainer(task=Blobs(), config=settings(tmp_path), quiet=True).fit()
    assert result.summary["validation"] == {}
    assert "margin" in by_step(read_events(result.run_dir / "events.jsonl"))[0]["metrics"]


def test_under_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook: fit blocks, fit_async leaves the loop free. Both in one process."""

    async def both() -> tuple[str, str, int]:
        first = Trainer(
            nn.Linear(4, 3), data=blobs(32), loss=loss, config=settings(tmp_path / "a"), quiet=True
        ).fit()
        ticks = 0
        running = asyncio.create_task(
            Trainer(
                nn.Linear(4, 3), data=blobs(32), loss=loss, config=settings(tmp_path / "b"), quiet=True
            ).fit_async()
        )
        while not running.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return first.status, (await running).status, ticks

    first, second, ticks = asyncio.run(both())
    assert (first, second) == ("completed", "completed")
    assert ticks > 1


def test_a_model_without_data_is_a_mistake() -> None:
    with pytest.raises(UserError, match="data and loss"):
        Trainer(nn.Linear(1, 1))


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Trainer(nn.Linear(4, 3), data=blobs(32), loss=loss, config=settings(tmp_path, epochs=1), quiet=True).fit()
    with pytest.raises(UserError, match="--resume auto"):
        Trainer(
            nn.Linear(4, 3), data=blobs(32), loss=loss, config=settings(tmp_path, epochs=1), quiet=True
        ).fit()


def test_it_is_told_before_a_cluster_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import orchestrator.runtime.cluster.session as module

    def started(*_: Any) -> Any:
        raise AssertionError("a cluster was started for a run that cannot begin")

    monkeypatch.setattr(module, "session", started)
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 0}\n', encoding="utf-8")
    with pytest.raises(UserError, match="holds a run already"):
        Trainer(config=Config.of(run_dir=tmp_path, workers=2), quiet=True).fit()
    with pytest.raises(AssertionError, match="a cluster was started"):
        Trainer(config=Config.of(run_dir=tmp_path / "another", workers=2), quiet=True).fit()


def test_a_run_that_diverges_fails_loudly_and_saves_nothing_of_it(tmp_path: Path) -> None:
    def explode(model: nn.Module, batch: Any) -> torch.Tensor:
        explode.calls += 1  # pyright: ignore[reportFunctionMemberAccess]
        return loss(model, batch) * (float("nan") if explode.calls > 12 else 1.0)  # pyright: ignore[reportFunctionMemberAccess]

    explode.calls = 0  # pyright: ignore[reportFunctionMemberAccess]
    config = settings(tmp_path, checkpoint_every=2, log_every=1)
    with pytest.raises(TrainingFailed, match="diverged"):
        Trainer(nn.Linear(4, 3), data=blobs(320), loss=explode, config=config, quiet=True).fit()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    events = read_events(tmp_path / "run" / "events.jsonl")
    bad = next(e["step"] for e in by_step(events) if e["loss"] == "nan")
    assert max(e["step"] for e in of_kind(events, "checkpoint")) < bad


def test_batch_norm_trains_and_survives_out_of_memory(tmp_path: Path) -> None:
    """Running statistics of a step done again are those of that step done once."""

    def seen_statistics(hurt: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        failed = []

        def fragile(model: nn.Module, batch: Any) -> torch.Tensor:
            made = loss(model, batch)
            if (
                hurt
                and len(batch[0]) == 16
                and not failed
                and model.training
                and batch[0].device.type == "cpu"
                and started
            ):
                failed.append(1)
                raise torch.OutOfMemoryError("injected")
            return made

        folder = tmp_path / str(hurt)
        started: list[int] = []
        trainer = Trainer(model, data=blobs(64), loss=fragile, config=settings(folder, epochs=1), quiet=True)
        prepared = trainer.prepare()
        started.append(1)
        trainer._alone(prepared)
        assert len(failed) == hurt
        return model[1].num_batches_tracked  # pyright: ignore[reportReturnType]

    assert int(seen_statistics(False)) == 4
    assert int(seen_statistics(True)) == 8  # four steps in two halves each, and nothing of the failed attempt


def test_the_seed_reaches_a_task_of_ones_own(tmp_path: Path) -> None:
    class Own(Task):
        def build_model(self) -> nn.Module:
            return nn.Linear(4, 3)

        def train_data(self) -> TensorData:
            return TensorData(*blobs(32))

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return loss(model, batch)

    def first_loss(seed: int, folder: str) -> float:
        Trainer(task=Own(), config=settings(tmp_path / folder, seed=seed, epochs=1), quiet=True).fit()
        return by_step(read_events(tmp_path / folder / "run" / "events.jsonl"))[0]["loss"]

    assert first_loss(1, "a") == first_loss(1, "b")
    assert first_loss(1, "c") != first_loss(2, "d")


def test_metrics_may_have_any_name(tmp_path: Path) -> None:
    def named(model: nn.Module, batch: Any) -> Any:
        made = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return (
            made,
            len(batch[1]),
            {"loss": made.detach() * 0 + 400, "norm": made.detach() * 0, "count": made.detach() * 0 + 1000},
        )

    Trainer(
        nn.Linear(4, 3), data=blobs(32), loss=named, config=settings(tmp_path, epochs=1), quiet=True
    ).fit()
    step = by_step(read_events(tmp_path / "run" / "events.jsonl"))[0]
    assert step["units"] == 16
    assert step["loss"] < 10
    assert step["grad_norm"] > 0
    assert step["metrics"]["loss"] == 25


def test_a_wrong_metric_name_is_found_before_the_first_epoch(tmp_path: Path) -> None:
    config = settings(tmp_path, early_stopping_metric="acuracy")
    with pytest.raises(UserError, match="not among the validation metrics"):
        Trainer(
            nn.Linear(4, 3), data=blobs(32), validation=blobs(8), loss=loss, config=config, quiet=True
        ).fit()


def test_a_full_disk_is_a_warning_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.train.checkpoint import store as checkpoint

    real, calls = checkpoint._write_whole, []

    def sometimes(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(checkpoint, "_write_whole", sometimes)
    result = Trainer(
        nn.Linear(4, 3), data=blobs(32), loss=loss, config=settings(tmp_path, epochs=2), quiet=True
    ).fit()
    assert result.status == "completed"
    (warning,) = of_kind(read_events(result.run_dir / "events.jsonl"), "warning")
    assert "No space left" in warning["message"]


def test_evaluation_that_does_not_fit_is_done_in_halves(tmp_path: Path) -> None:
    def tight(model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training and len(batch[0]) > 5:
            raise torch.OutOfMemoryError("injected")
        return loss(model, batch)

    means = []
    for name, function in (("plain", loss), ("tight", tight)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        config = settings(tmp_path / name, epochs=1)
        result = Trainer(
            model, data=blobs(32), validation=blobs(23, 1), loss=function, config=config, quiet=True
        ).fit()
        means.append(result.summary["validation"]["loss"])
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def test_an_error_in_a_loader_process_is_told_like_any_other(tmp_path: Path) -> None:
    class Broken:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            if index == 40:
                raise ValueError("broken file 40.png")
            return torch.zeros(4), 0

    config = settings(tmp_path, loader_workers=2)
    with pytest.raises(TaskFailed) as caught:
        Trainer(nn.Linear(4, 3), data=Broken(), loss=loss, config=config, quiet=True).fit()
    lines = str(caught.value).splitlines()
    assert lines[0] == "ValueError: broken file 40.png"
    assert "test_trainer.py" in lines[-2]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_leaves_the_callers_randomness_alone(tmp_path: Path) -> None:
    drawn = []
    for name in ("a", "b"):
        torch.manual_seed(7)
        Trainer(
            nn.Linear(4, 3), data=blobs(32), loss=loss, config=settings(tmp_path / name, epochs=1), quiet=True
        ).fit()
        drawn.append(torch.rand(3).tolist())
    torch.manual_seed(7)
    nn.Linear(4, 3)
    assert drawn == [torch.rand(3).tolist()] * 2


@pytest.mark.parametrize(
    "wrong", [{"data": blobs(8), "loss": loss}, {"task": "text"}, {"config": {"epochs": 1}}]
)
def test_wrong_arguments_are_answered(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model|Config"):
        Trainer(**wrong)


def test_metrics_may_be_plain_numbers_and_data_numpy(tmp_path: Path) -> None:
    x, y = blobs(32)

    def named(model: nn.Module, batch: Any) -> Loss:
        return Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]), {"right": 8})  # pyright: ignore[reportArgumentType]

    Trainer(
        nn.Linear(4, 3),
        data=(x.numpy(), y.numpy()),
        loss=named,
        config=settings(tmp_path, epochs=1),
        quiet=True,
    ).fit()
    assert by_step(read_events(tmp_path / "run" / "events.jsonl"))[0]["metrics"] == {"right": 0.5}


def test_patience_without_validation_data_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs validation data"):
        Trainer(
            nn.Linear(4, 3),
            data=blobs(8),
            loss=loss,
            config=settings(tmp_path, early_stopping_patience=1),
            quiet=True,
        ).fit()


def test_another_batch_size_on_resume_moves_the_end_of_the_schedule(tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=2, batch_size=16, max_steps=4)
    Trainer(nn.Linear(4, 3), data=blobs(64), loss=loss, config=config, quiet=True).fit()
    config = settings(tmp_path, epochs=2, batch_size=8, resume="auto")
    Trainer(nn.Linear(4, 3), data=blobs(64), loss=loss, config=config, quiet=True).fit()
    events = read_events(tmp_path / "run" / "events.jsonl")
    steps = by_step(events)
    assert len(steps) == 4 + 8
    assert of_kind(events, "start")[-1]["total_steps"] == 12
    assert steps[-1]["lr"] < 0.2 * max(step["lr"] for step in steps)


def test_early_stopping_and_best(tmp_path: Path) -> None:
    config = settings(
        tmp_path, epochs=50, early_stopping_patience=2, learning_rate=0.2, schedule="constant", keep=1
    )
    result = Trainer(
        nn.Linear(4, 3), data=blobs(64), validation=blobs(64, 1), loss=loss, config=config, quiet=True
    ).fit()
    events = read_events(result.run_dir / "events.jsonl")
    evaluations = of_kind(events, "evaluate")
    assert len(evaluations) < 50
    assert [e["best"] for e in evaluations[-2:]] == [False, False]
    best = next(e["step"] for e in reversed(evaluations) if e["best"])
    kept = sorted(int(p.name[5:]) for p in (result.run_dir / "checkpoints").glob("step_*"))
    assert kept == sorted({best, evaluations[-1]["step"]})


def test_a_tracker_that_fails_is_a_warning_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.record import tracker_backends as tracker_kinds

    def broken(*_: Any) -> Any:
        raise RuntimeError("no tracker today")

    monkeypatch.setitem(tracker_kinds.FACTORIES, "tensorboard", broken)  # pyright: ignore[reportArgumentType]
    config = settings(tmp_path, trackers=("tensorboard",), monitor_gpu=True)
    result = Trainer(nn.Linear(4, 3), data=blobs(64), loss=loss, config=config, quiet=True).fit()
    events = read_events(result.run_dir / "events.jsonl")
    assert result.status == "completed"
    assert any("no tracker today" in event["message"] for event in of_kind(events, "warning"))
    assert of_kind(events, "monitor")[-1]["host"]["process_memory"] > 0  # of a run too short for the interval


def test_debug_is_short(tmp_path: Path) -> None:
    result = Trainer(config=Config.of(debug=True, run_dir=tmp_path / "run", trackers=()), quiet=True).fit()
    assert result.summary["steps"] == 4
    assert result.summary["global_batch_size"] == 4


def test_profile_writes_a_trace_and_a_table(tmp_path: Path) -> None:
    config = settings(tmp_path, profile=True)
    Trainer(nn.Linear(4, 3), data=blobs(200), loss=loss, config=config, quiet=True).fit()
    assert "traceEvents" in json.loads((tmp_path / "run" / "trace.json").read_text())
    assert "addmm" in (tmp_path / "run" / "profile.txt").read_text()


def test_batch_size_auto_on_a_cpu_is_measured_once(tmp_path: Path) -> None:
    config = settings(tmp_path, batch_size="auto", max_steps=2)
    Trainer(nn.Linear(4, 3), data=blobs(512), loss=loss, config=config, quiet=True).fit()
    first = json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]["batch_size"]
    assert "measured throughput" in first["reason"]
    assert 1 <= first["value"] <= 64  # an eighth of the data
    Trainer(
        nn.Linear(4, 3), data=blobs(512), loss=loss, config=config.but(resume="auto", max_steps=4), quiet=True
    ).fit()
    again = json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]["batch_size"]
    assert again == {
        "value": first["value"],
        "reason": "measured when the run was first started",
        "rejected": [],
    }


def test_compile_falls_back_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails: the step is done again without it, and the run says so."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend=broken))
    result = Trainer(
        nn.Linear(4, 3), data=blobs(64), loss=loss, config=settings(tmp_path, compile=True), quiet=True
    ).fit()
    assert result.status == "completed"
    (event,) = of_kind(read_events(result.run_dir / "events.jsonl"), "compile")
    assert event["status"] == "failed"
    assert "no compiler here" in event["detail"]


def test_compile_compiles_even_modules_of_torch_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend=counting))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    result = Trainer(
        model, data=blobs(64), loss=loss, config=settings(tmp_path, compile=True), quiet=True
    ).fit()
    assert graphs
    (event,) = of_kind(read_events(result.run_dir / "events.jsonl"), "compile")
    assert event["status"] == "compiled"


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
        losses.append([e["loss"] for e in by_step(read_events(tmp_path / switch / "run" / "events.jsonl"))])
    assert losses[0] == losses[1]


def test_sigint_writes_a_checkpoint_and_exits_130(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrator",
        "train",
        "--run-dir",
        str(tmp_path / "run"),
        "--epochs",
        "5000",
        "--trackers",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    while process.poll() is None and len(of_kind(read_events(tmp_path / "run" / "events.jsonl"), "step")) < 5:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "--resume auto" in output
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert of_kind(events, "end")[0]["status"] == "stopped"
    assert of_kind(events, "checkpoint")[-1]["step"] == by_step(events)[-1]["step"]


def test_everything_from_python(tmp_path: Path) -> None:
    from orchestrator import draw_report

    config = settings(tmp_path, batch_size=None)
    trainer = Trainer(nn.Linear(4, 3), data=blobs(256), loss=loss, config=config, quiet=True)
    found = trainer.find_batch_size()
    assert found.batch_size in [probe.batch for probe in found.probes]
    (row,) = trainer.bench(iterations=4)
    assert row.iterations == 4
    assert {"forward", "backward", "optimizer", "total"} <= set(row.median)
    assert row.median["total"] >= row.median["forward"] > 0
    trainer.fit()
    (tmp_path / "run" / "report.html").unlink()
    assert tmp_path / "run" / "report.html" in draw_report(tmp_path / "run")


def test_monitor_by_hand() -> None:
    with Monitor(interval_s=0.05) as monitor:
        monitor.record()
    assert monitor.summary()["host"]["process_memory"]["max"] > 0
    assert monitor.info()["cores"] >= 1
