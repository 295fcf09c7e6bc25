"""The point that a run starts from: its own or another checkpoint, or given weights."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.runs.loop_runs import SMALL, losses_in, run_loop
from harness.storage.checkpoints import DAMAGE_KINDS, damage
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.digits import Digits
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.train.worker.build_model import build_parts
from orchestrator.train.worker.resume import StartPoint, _resumed, restore_checkpoint
from orchestrator.trainer import Trainer


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("num_damages", [10, 40])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, num_damages: int) -> None:
    """Random damages, of each kind."""
    _, losses = run_loop(tmp_path / "run", max_steps=8, checkpoint_every=2)
    config = Config.of(**SMALL, resume="auto", run_dir=tmp_path / "run", max_steps=8)
    prepared = Trainer(config=config, quiet=True).prepare()
    generator = random.Random(11)
    kinds = set()
    for number in range(num_damages):
        run_dir = tmp_path / f"case{number}"
        checkpoints = run_dir / "checkpoints"
        shutil.copytree(tmp_path / "run" / "checkpoints", checkpoints)
        kind, _ = damage(checkpoints / "step_00000008", checkpoints / "step_00000006", generator)
        kinds.add(kind)
        log = EventLog(run_dir / "events.jsonl")
        loop = Loop(build_training(WorkerContext(prepared, World.single_process(), run_dir, log)))
        (resumed,) = of_kind(read_events(run_dir / "events.jsonl"), "resume")
        assert resumed["step"] == 6
        assert resumed["skipped"][0]["path"] == "step_00000008"
        loop.run()
        log.close()
        assert losses_in(run_dir) == losses[6:8]
        shutil.rmtree(run_dir)
    assert kinds == set(DAMAGE_KINDS)


def test_a_resume_inside_an_epoch_uses_each_sample_once(tmp_path: Path) -> None:
    whole, losses = run_loop(tmp_path / "whole", max_steps=100, epochs=2)
    run_loop(tmp_path / "parts", max_steps=37, epochs=2)
    loop, resumed_losses = run_loop(tmp_path / "parts", max_steps=100, epochs=2, resume="auto")
    assert resumed_losses == losses
    assert replace(loop.progress, epoch_seconds=0.0) == replace(whole.progress, epoch_seconds=0.0)


@pytest.mark.extended
def test_a_resume_at_the_end_of_an_epoch_records_the_epoch_as_it_was(tmp_path: Path) -> None:
    run_loop(tmp_path / "whole", epochs=1)
    (whole,) = of_kind(read_events(tmp_path / "whole" / "events.jsonl"), "epoch")
    first = tmp_path / "first"
    run_loop(first, epochs=2, checkpoint_every=whole["step"], keep=9)
    # The checkpoint was written before the end of the epoch was known.
    saved = first / "checkpoints" / f"step_{whole['step']:08}"
    run_loop(tmp_path / "second", epochs=2, resume=str(saved))
    runs = (first, tmp_path / "second")
    expected, found = (of_kind(read_events(run / "events.jsonl"), "epoch")[0] for run in runs)
    fields = ("epoch", "step", "seconds", "samples", "loss", "samples_per_second")
    assert {name: found[name] for name in fields} == {name: expected[name] for name in fields}


@pytest.mark.parametrize("is_main", [True, False])
def test_all_wait_while_the_main_worker_sets_checkpoints_aside(is_main: bool) -> None:
    calls: list[object] = []
    world: Any = SimpleNamespace(is_main=is_main, wait_for_main=lambda name: calls.append("waited"))
    store: Any = SimpleNamespace(set_aside_after=lambda *arguments: calls.append(arguments))
    start = StartPoint(store, world, SilentLog(), progress=calls.clear)
    _resumed(Progress(step=7), start, None, [])
    assert calls == ([(7, calls.clear)] if is_main else []) + ["waited"]


@pytest.mark.extended
def test_a_run_resumes_from_the_path_of_another_run(tmp_path: Path) -> None:
    first = tmp_path / "first"
    _, losses = run_loop(first, max_steps=6, checkpoint_every=3)
    checkpoint = str(first / "checkpoints" / "step_00000003")
    _, from_checkpoint = run_loop(tmp_path / "from_checkpoint", max_steps=6, resume=checkpoint)
    assert from_checkpoint == losses[3:]
    _, from_run = run_loop(tmp_path / "from_run", max_steps=6, resume=str(first))
    assert from_run == [], "its last checkpoint is of the last step"
    with pytest.raises(UserError, match="no such folder"):
        run_loop(tmp_path / "third", resume=str(tmp_path / "nowhere"))


def test_init_from_takes_the_weights_alone(tmp_path: Path) -> None:
    loop, _ = run_loop(tmp_path / "first", max_steps=5)
    config = Config.of(**SMALL, init_from=tmp_path / "first" / "checkpoints" / "step_00000005")
    prepared = Trainer(config=config, quiet=True).prepare()
    world = World.single_process()
    parts = build_parts(config, prepared.plan, prepared.task, world)
    store = CheckpointStore(tmp_path / "second")
    start = StartPoint(store, world, EventLog(tmp_path / "events.jsonl"))
    progress = restore_checkpoint(config, parts.state, start)
    assert progress.step == 0
    assert not parts.optimizer.inner.state
    for name, parameter in loop.stepper.strategy.model.named_parameters():
        assert torch.equal(parts.model.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 12}, "give the sizes it was trained with"),
        (
            {"experts": 4, "expert_hidden_size": (4, 8, 4, 4)},
            "give the number of experts it was trained with",
        ),
    ],
)
def test_other_sizes_are_refused_with_advice(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    run_loop(tmp_path / "run", max_steps=2)
    with pytest.raises(UserError, match=message):
        run_loop(tmp_path / "run", max_steps=4, resume="auto", **settings)


def test_checkpoints_are_keyed_by_expert(tmp_path: Path) -> None:
    run_loop(tmp_path / "run", max_steps=2)
    newest, _ = CheckpointStore(tmp_path / "run" / "checkpoints").newest_good()
    assert newest is not None
    contents = newest.contents
    model_names = set(contents.tensors["model"])
    optimizer_names = set(contents.tensors["optimizer"])
    bank = "blocks.0.ffn.bank"
    assert {
        f"{bank}.0.up",
        f"{bank}.1.down",
        f"{bank}.2.up",
        "blocks.0.ffn.load_E",
    } <= model_names
    assert {
        f"exp_avg/{bank}.1.up",
        f"step/{bank}.1.up",
        "exp_avg_sq/stem.weight",
    } <= optimizer_names
    wrapped = [name for name in model_names if "module." in name or "_orig_mod" in name]
    assert wrapped == []


class DigitsWithSGD(Digits):
    settings_read = tuple(SMALL)  # The schedule of the small runs is not refused, though unread.

    def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)

    def schedule(self) -> Any:
        return lambda step: 0.99**step


@pytest.mark.extended
def test_a_run_with_momentum_resumes(tmp_path: Path) -> None:
    task = DigitsWithSGD(Config.of(**SMALL))
    _, losses = run_loop(tmp_path / "whole", task, max_steps=12)
    run_loop(tmp_path / "parts", task, max_steps=5)
    _, resumed_losses = run_loop(tmp_path / "parts", task, max_steps=12, resume="auto")
    assert resumed_losses == losses
