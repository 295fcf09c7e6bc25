"""Building the training of a worker, and what a failure leaves behind."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from harness.runs.loop_runs import build_small_training, run_loop
from harness.runs.records import by_step
from harness.runs.tiny_model import Tiny
from orchestrator import JsonLines
from orchestrator.checkpoint.files import AVERAGE_SLOT
from orchestrator.config.sections.parallel import ParallelSettings
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop
from orchestrator.train.strategies import building, ddp
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buffers import persistent_buffers
from orchestrator.train.worker import build as build_module
from orchestrator.train.worker import build_model as build_model_module
from orchestrator.trainer import Trainer
from orchestrator.types import Choice


def test_a_run_that_cannot_start_leaves_the_settings_of_torch_as_they_were(tmp_path: Path) -> None:
    settings: Any = importlib.import_module("torch._functorch.config")
    before = settings.ban_recompute_used_far_apart
    recompiles = logging.getLogger("torch._dynamo.guards.__recompiles")
    handlers = list(recompiles.handlers)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = (torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
    config = Config.of(epochs=1, compile="on", early_stopping_patience=2, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match="needs validation data"):
        Trainer(nn.Linear(3, 2), data=data, loss=loss, config=config, quiet=True).fit()
    assert before is True
    assert settings.ban_recompute_used_far_apart is True
    assert recompiles.handlers == handlers


@pytest.mark.parametrize(
    ("settings", "state_bytes"),
    [({}, 16), ({"optimizer": "sgd"}, 12), ({"ema_decay": 0.9}, 20)],
    ids=str,
)
def test_experts_move_by_the_memory_that_placed_them(
    settings: dict[str, Any], state_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[float] = []
    monkeypatch.setattr(build_module, "build_evolution", lambda *arguments: built.append(arguments[-1]))
    build_small_training(tmp_path, EventLog(tmp_path / "events.jsonl"), **settings).close()
    assert built == [state_bytes]


def test_both_evaluations_count_the_loads_of_changed_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Evaluation, "experts_changed", lambda self: told.append(self.name))
    log = EventLog(tmp_path / "events.jsonl")
    training = build_small_training(tmp_path, log, evolution="bold", max_steps=20)
    assert training.evolution is not None
    training.evolution._execution._take_over()
    training.close()
    assert told == ["evaluate", "evolution"]


def test_a_run_resumed_in_mid_epoch_with_another_batch_follows_the_new_number_of_steps(
    tmp_path: Path,
) -> None:
    """Half of 96 samples in 3 steps of 16, the rest in 4 of 12, and the second epoch in 8: 15 steps.

    A run with batches of 12 from the start would have 16."""
    settings: dict[str, Any] = {"schedule": "linear", "learning_rate": 1e-2, "epochs": 2, "evaluate_every": 0}
    task = Tiny(((4, 4),), samples=96, dtype=torch.float32)
    first: dict[str, Any] = settings | {"batch_size": 16, "max_steps": 3}
    second: dict[str, Any] = settings | {"batch_size": 12, "resume": "auto"}
    run_loop(tmp_path / "run", task, **first)
    run_loop(tmp_path / "run", task, **second)
    events = read_events(tmp_path / "run" / "events.jsonl")
    rates = [event["lr"] for event in by_step(events)]
    assert rates[3:] == pytest.approx([1e-2 * (1 - step / 15) for step in range(3, 15)])
    (warning,) = [event for event in of_kind(events, "warning") if event["kind"] == "schedule"]
    assert "ends at step 15" in warning["message"]


def test_each_setting_of_ddp_reaches_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[ParallelSettings, Any]] = []

    class Recorded(Strategy):
        def __init__(self, model: nn.Module, task: Any, _: World, *settings: Any) -> None:
            super().__init__(model, task)
            given.append((settings[0], settings[2]))

    monkeypatch.setattr(building, "DDPStrategy", Recorded)
    config = Config.of(
        bucket_cap_mb=7, static_graph=True, gradient_as_bucket_view=False, broadcast_buffers="on", workers=2
    )
    task = Tiny(((4, 4),))
    two_workers = replace(World.single_process(), size=2)
    plan = Trainer(task=task, config=Config.of(run_dir=tmp_path), quiet=True).prepare().plan
    build_model_module.build_parts(config, plan, task, two_workers)
    assert given == [(config.parallel, persistent_buffers)]
    wrapped: list[dict[str, Any]] = []
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda _, **options: wrapped.append(options))
    monkeypatch.setattr(World, "torch_group", lambda *_: None)
    ddp.DDPStrategy(nn.Linear(2, 2), task, World.single_process(), config.parallel, print)._wrap_model()
    (options,) = wrapped
    assert (options["bucket_cap_mb"], options["gradient_as_bucket_view"]) == (7, False)
    assert (options["static_graph"], options["find_unused_parameters"]) == (True, False)


def test_as_many_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    for keep in (1, 4):
        run_dir = tmp_path / str(keep)
        run_loop(run_dir, max_steps=6, checkpoint_every=1, keep=keep, keep_last=True, evaluate_every=100)
        assert len(list((run_dir / "checkpoints").glob("step_*"))) == keep


def test_a_run_resumed_without_an_average_drops_the_saved_one(tmp_path: Path) -> None:
    def has_average(loop: Loop) -> bool:
        states = loop.stepper.optimizer.inner.state.values()
        return any(AVERAGE_SLOT in state for state in states)

    first, _ = run_loop(tmp_path, max_steps=2, ema_decay=0.9)
    assert has_average(first)
    resumed, _ = run_loop(tmp_path, max_steps=4, resume="auto")
    assert not has_average(resumed)


def test_a_stream_is_shuffled_over_as_many_samples_as_asked(tmp_path: Path) -> None:
    """With a buffer of two, the first batch has only samples from the beginning of the file."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{number}\n" for number in range(512)))

    class Numbers(Tiny):
        def train_data(self) -> Any:
            return JsonLines(file, transform=lambda number: (torch.full((7,), float(number)), 0))

    task = Numbers(((4, 4),), dtype=torch.float32)

    def first_numbers(buffer: int) -> Tensor:
        log = EventLog(tmp_path / f"events_{buffer}.jsonl")
        training = build_small_training(tmp_path, log, task, max_steps=2, shuffle_buffer=buffer, batch_size=8)
        batch = next(iter(training.feed.steps(0)))
        training.close()
        return torch.cat([micro.fetch()[0][:, 0] for micro in batch.micro_batches])

    assert first_numbers(2).max() <= 9
    assert first_numbers(256).max() > 9
    loop, _ = run_loop(tmp_path / "run", task, max_steps=3, shuffle_buffer=4, batch_size=8)
    assert loop.progress.place is not None
    assert 0 < loop.progress.place.position <= 24, "a resumed run begins to read here"


def test_settings_of_a_step_reach_the_stepper(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clip_norm": 0.25, "seed": 7, "learning_rate": 0.02, "schedule": "linear"}
    settings |= {"warmup_steps": 4, "max_steps": 8, "expert_kernel": "loop", "recompute_experts": True}
    training = build_small_training(tmp_path, EventLog(tmp_path / "events.jsonl"), **settings)
    training.close()
    stepper = training.stepper
    assert (stepper.clip_norm, stepper.seed) == (0.25, 7)
    rates = [stepper.optimizer.learning_rate(step) for step in (0, 1, 3)]
    assert rates == pytest.approx([0.004, 0.008, 0.016])
    (layer,) = [layer for _, layer in moe_layers(stepper.strategy.model)]
    assert (layer.bank.kernel, layer.bank.recomputes) == ("loop", True)


def test_choices_of_the_plan_reach_the_parts(tmp_path: Path) -> None:
    task = Tiny(((4, 4),))
    plan = Trainer(task=task, config=Config.of(run_dir=tmp_path), quiet=True).prepare().plan
    plan = replace(plan, learning_rate=Choice(0.5, "test"), expert_kernel=Choice("loop", "test"))
    plan = replace(plan, warmup_steps=Choice(0, "test"))
    parts = build_model_module.build_parts(Config.of(), plan, task, World.single_process())
    assert parts.optimizer.learning_rate(0) == pytest.approx(0.5)
    (layer,) = [layer for _, layer in moe_layers(parts.model)]
    assert layer.bank.kernel == "loop"
