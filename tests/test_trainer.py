"""Tests of the Python API: your own model, data and loss; tasks; notebooks; mistakes; the result."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.runs.blob_trainers import Blobs, blobs, cross_entropy, events_of, settings, trainer
from harness.runs.records import by_step
from orchestrator import Callback, Config, Loss, Monitor, Result, Trainer, draw_report, read_run
from orchestrator.errors import UserError
from orchestrator.record.files.reading import of_kind

# The model, its data and its loss


@pytest.mark.usefixtures("pictures_at_the_end")
def test_your_own_model_data_and_loss_are_trained(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    config = settings(tmp_path, learning_rate=0.1)
    result = trainer(config, blobs(200), model=model, validation=blobs(50, 1)).fit()
    assert result.status == "completed"
    assert result.summary["validation"]["loss"] < 0.7
    assert not torch.equal(before, model.weight)
    assert torch.equal(model.weight, result.model.get_parameter("weight"))
    assert re.search(r"^  steps +39$", result.performance_summary(), flags=re.MULTILINE)
    files = ("config.yaml", "plan.json", "events.jsonl", "summary.json", "report.html")
    for name in (*files, "training_metrics.png"):
        assert (result.run_dir / name).stat().st_size > 0, name


@pytest.mark.usefixtures("pictures_at_the_end")
def test_without_plots_only_the_report_command_draws_pictures(tmp_path: Path) -> None:
    result = trainer(settings(tmp_path, plots="off", max_steps=2), blobs(20)).fit()
    assert (result.run_dir / "report.html").is_file()
    assert not list(result.run_dir.glob("*.png"))
    draw_report(result.run_dir)
    assert (result.run_dir / "training_metrics.png").is_file()


def test_a_scalar_loss_is_averaged_over_all_samples(tmp_path: Path) -> None:
    """A short last micro-batch is weighted by its samples: 4 + 4 + 2 samples give the mean over 10."""
    data = blobs(10)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    expected = float(cross_entropy(model, data).detach())
    trainer(settings(tmp_path, batch_size=4, global_batch_size=10, epochs=1), data, model=model).fit()
    (step,) = by_step(events_of(tmp_path))
    assert step["loss"] == pytest.approx(expected, rel=1e-6)


def test_your_own_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    own = trainer(
        settings(tmp_path, epochs=1),
        blobs(64),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        schedule=lambda step: 0.5**step,
    )
    assert not own.prepare().plan.fused_optimizer.value
    own.fit()
    assert [step["lr"] for step in by_step(events_of(tmp_path))] == [0.5, 0.25, 0.125, 0.0625]


def test_a_task_class_is_trained(tmp_path: Path) -> None:
    result = Trainer(task=Blobs(), config=settings(tmp_path), quiet=True).fit()
    assert result.summary["validation"] == {}
    assert "margin" in by_step(events_of(tmp_path))[0]["metrics"]


def test_the_seed_reaches_your_own_task(tmp_path: Path) -> None:
    def first_loss(seed: int, folder: str) -> float:
        config = settings(tmp_path / folder, seed=seed, epochs=1)
        Trainer(task=Blobs(), config=config, quiet=True).fit()
        return by_step(events_of(tmp_path / folder))[0]["loss"]

    assert first_loss(1, "a") == first_loss(1, "b")
    assert first_loss(1, "c") != first_loss(2, "d")


def test_metrics_may_have_the_names_of_our_fields(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        loss_sum = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        zero = loss_sum.detach() * 0
        return loss_sum, len(batch[1]), {"loss": zero + 400, "norm": zero, "count": zero + 1000}

    trainer(settings(tmp_path, epochs=1), loss=loss).fit()
    step = by_step(events_of(tmp_path))[0]
    assert step["units"] == 16
    assert step["loss"] < 10
    assert step["grad_norm"] > 0
    assert step["metrics"]["loss"] == 25


def test_metrics_may_be_plain_numbers_and_data_numpy(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Loss:
        loss_sum = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return Loss(loss_sum, len(batch[1]), {"right": 8})

    x, y = blobs(32)
    trainer(settings(tmp_path, epochs=1), (x.numpy(), y.numpy()), loss).fit()
    assert by_step(events_of(tmp_path))[0]["metrics"] == {"right": 0.5}


# The result


def test_the_history_is_the_table_of_the_run(tmp_path: Path) -> None:
    result = trainer(settings(tmp_path, epochs=2), validation=blobs(8, 1)).fit()
    history = result.history
    pd.testing.assert_frame_equal(history, read_run(result.run_dir))
    assert history.index.tolist() == [1, 2, 3, 4]
    assert history["loss"].tolist() == [step["loss"] for step in by_step(events_of(tmp_path))]
    assert history["validation_loss"].isna().tolist() == [True, False, True, False]
    assert history["validation_loss"].iloc[-1] == result.summary["validation"]["loss"]


def test_the_best_checkpoint_is_kept_and_training_stops_early(tmp_path: Path) -> None:
    config = settings(
        tmp_path, epochs=50, early_stopping_patience=2, learning_rate=0.2, schedule="constant", keep=1
    )
    result = trainer(config, blobs(64), validation=blobs(64, 1)).fit()
    evaluations = of_kind(events_of(tmp_path), "evaluate")
    assert len(evaluations) < 50
    assert [event["best"] for event in evaluations[-2:]] == [False, False]
    best = next(event["step"] for event in reversed(evaluations) if event["best"])
    steps = sorted(int(path.name[5:]) for path in (result.run_dir / "checkpoints").glob("step_*"))
    assert steps == sorted({best, evaluations[-1]["step"]})
    assert result.best_checkpoint == result.run_dir / "checkpoints" / f"step_{best:08d}"


@pytest.mark.extended
def test_batch_size_bench_fit_and_report_work_from_python(tmp_path: Path) -> None:
    own = trainer(settings(tmp_path, batch_size=None), blobs(256))
    batch = own.find_batch_size()
    assert batch.batch_size in [probe.batch for probe in batch.probes]
    (row,) = own.bench(iterations=4)
    assert row.iterations == 4
    assert {"forward", "backward", "optimizer", "total"} <= set(row.median)
    assert row.median["total"] >= row.median["forward"] > 0
    own.fit()
    (tmp_path / "run" / "report.html").unlink()
    assert tmp_path / "run" / "report.html" in draw_report(tmp_path / "run")


def test_a_debug_run_is_short(tmp_path: Path) -> None:
    result = Trainer(config=Config.of(debug=True, run_dir=tmp_path / "run", trackers=()), quiet=True).fit()
    assert result.summary["steps"] == 4
    assert result.summary["global_batch_size"] == 4


def test_the_monitor_works_without_a_trainer() -> None:
    with Monitor(interval_s=0.05) as monitor:
        monitor.record()
    assert monitor.summary()["host"]["process_memory"]["max"] > 0
    assert monitor.info()["cores"] >= 1


# The caller's process


def test_a_run_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook: fit blocks the loop, fit_async does not. Both in one process."""

    async def run_both() -> tuple[str, str, int]:
        first = trainer(settings(tmp_path / "a")).fit()
        second: asyncio.Task[Result] = asyncio.create_task(trainer(settings(tmp_path / "b")).fit_async())
        num_ticks = 0
        while not second.done():
            num_ticks += 1
            await asyncio.sleep(0.001)
        return first.status, (await second).status, num_ticks

    first, second, num_ticks = asyncio.run(run_both())
    assert (first, second) == ("completed", "completed")
    assert num_ticks > 1


def test_a_run_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    numbers = []
    for name in ("a", "b"):
        torch.manual_seed(7)
        trainer(settings(tmp_path / name, epochs=1)).fit()
        numbers.append(torch.rand(3).tolist())
    torch.manual_seed(7)
    nn.Linear(4, 3)
    assert numbers == [torch.rand(3).tolist()] * 2


# Mistakes


def test_a_model_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="data and loss"):
        Trainer(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "arguments", [{"data": blobs(8), "loss": cross_entropy}, {"task": "text"}, {"config": {"epochs": 1}}]
)
def test_wrong_arguments_are_refused_with_the_right_ones(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model|Config"):
        Trainer(**arguments)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"optimizer": "sgd"}, r"optimizer is 'sgd'; a function .+ Config.of\(optimizer='sgd'\)"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)},
            "optimizer is a SGD; a function",
        ),
        ({"schedule": "cosine"}, "schedule is 'cosine'; a function from the step"),
        ({"callbacks": Callback()}, "callbacks is .+; a list of objects is needed"),
        ({"callbacks": "my_module:Stop"}, "callbacks is 'my_module:Stop'; a list of objects is needed"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused_at_once(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(Config(), **parts)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("train_data", r"Trainer has no argument 'train_data' \(did you mean 'data'\?\)"),
        ("eval_dataset", r"did you mean 'validation'"),
        ("criterion", r"did you mean 'loss'"),
        ("calbacks", r"did you mean 'callbacks'"),
        ("epochs", r"it is a setting: config=Config.of\(epochs=3\)"),
        ("max_epochs", r"settings are given in config=Config.of\(...\): write epochs=3"),
        ("colour", r"'colour'; it has model, data, loss, validation"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_one_that_is_meant(name: str, answer: str) -> None:
    given: dict[str, Any] = {name: 3}
    with pytest.raises(UserError, match=answer):
        trainer(Config(), **given)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=1)).fit()
    with pytest.raises(UserError, match=r"holds a run already; continue it with Trainer\("):
        trainer(settings(tmp_path, epochs=1)).fit()


def test_a_used_folder_is_refused_before_a_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orchestrator.runtime.cluster.session as module

    def fail(*_: Any) -> Any:
        raise AssertionError("a cluster was started for a run that cannot begin")

    monkeypatch.setattr(module, "session", fail)
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 0}\n', encoding="utf-8")
    with pytest.raises(UserError, match="holds a run already"):
        Trainer(config=Config.of(run_dir=tmp_path, workers=2), quiet=True).fit()
    with pytest.raises(AssertionError, match="a cluster was started"):
        Trainer(config=Config.of(run_dir=tmp_path / "another", workers=2), quiet=True).fit()


def test_an_unknown_metric_is_refused_before_there_is_a_run_folder(tmp_path: Path) -> None:
    for name in ("acuracy", "f1"):  # without and with a known direction
        with pytest.raises(UserError, match=f"{name!r} is not among the validation metrics: loss"):
            trainer(settings(tmp_path, early_stopping_metric=name), validation=blobs(8)).fit()
        assert not (tmp_path / "run").exists()


def test_patience_without_validation_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs validation data"):
        trainer(settings(tmp_path, early_stopping_patience=1), blobs(8)).fit()
