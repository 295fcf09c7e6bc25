"""Resuming, put together: a hundred damaged checkpoints, another optimizer, other sizes, weights alone."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.events import EventLog, by_step, of_kind, read_events
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.loop import Loop
from orchestrator.train.parts.world import World
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.train.worker.build_model import build_parts
from orchestrator.train.worker.resume import restore_checkpoint
from orchestrator.trainer import Trainer
from tests.train.checkpoint.test_store import damage

SMALL: dict[str, Any] = {
    "width": 8,
    "expert_hidden_size": (4, 8, 4),
    "experts": 3,
    "layers": 1,
    "batch_size": 16,
    "log_every": 1,
}
SMALL |= {"schedule": "constant", "warmup_steps": 0}  # so that a shorter run begins like a longer one


def run(run_dir: Path, task: Any = None, **settings: Any) -> tuple[Loop, list[float]]:
    """Run the loop in a folder, without screen, report or monitor. Returns it and the losses of all steps."""
    config = Config.of(**SMALL | {"run_dir": run_dir} | settings)
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    run_dir.mkdir(parents=True, exist_ok=True)
    log = EventLog(run_dir / "events.jsonl")
    loop = Loop(build_training(WorkerContext(prepared, World.single_process(), run_dir, log)))
    loop.run()
    log.close()
    return loop, [event["loss"] for event in by_step(read_events(run_dir / "events.jsonl"))]


def test_a_hundred_corruptions_and_each_run_continues_from_the_one_before(tmp_path: Path) -> None:
    _, losses = run(tmp_path / "run", max_steps=8, checkpoint_every=2)
    clean, generator = tmp_path / "clean", random.Random(11)
    shutil.copytree(tmp_path / "run" / "checkpoints", clean)
    config = Config.of(**SMALL, resume="auto", run_dir=tmp_path / "run", max_steps=8)
    prepared = Trainer(config=config, quiet=True).prepare()
    kinds = set()
    for number in range(100):
        folder = tmp_path / f"case{number}"
        shutil.copytree(clean, folder / "checkpoints")
        kinds.add(
            damage(
                folder / "checkpoints" / "step_00000008", folder / "checkpoints" / "step_00000006", generator
            ).split()[0]
        )
        log = EventLog(folder / "events.jsonl")
        loop = Loop(build_training(WorkerContext(prepared, World.single_process(), folder, log)))
        resumed = of_kind(read_events(folder / "events.jsonl"), "resume")[0]
        assert resumed["step"] == 6
        assert resumed["skipped"][0]["path"] == "step_00000008"
        loop.run()
        log.close()
        assert [event["loss"] for event in by_step(read_events(folder / "events.jsonl"))] == losses[6:8]
        shutil.rmtree(folder)
    assert kinds == {"flip", "truncate", "missing", "swap"}


def test_resume_in_the_middle_of_an_epoch_uses_each_sample_once(tmp_path: Path) -> None:
    whole, losses = run(tmp_path / "whole", max_steps=100, epochs=2)
    run(tmp_path / "parts", max_steps=37, epochs=2)
    loop, resumed = run(tmp_path / "parts", max_steps=100, epochs=2, resume="auto")
    assert resumed == losses
    assert replace(loop.progress, epoch_seconds=0.0) == replace(whole.progress, epoch_seconds=0.0)


def test_resume_from_the_path_of_another_run(tmp_path: Path) -> None:
    _, losses = run(tmp_path / "first", max_steps=6, checkpoint_every=3)
    for source in (tmp_path / "first" / "checkpoints" / "step_00000003", tmp_path / "first"):
        _, again = run(tmp_path / f"from_{source.name}", max_steps=6, resume=str(source))
        assert again == losses[3:] if source.name.startswith("step") else not again
    with pytest.raises(UserError, match="no such folder"):
        run(tmp_path / "third", resume=str(tmp_path / "nowhere"))


def test_init_from_takes_the_weights_alone(tmp_path: Path) -> None:
    loop, _ = run(tmp_path / "first", max_steps=5)
    config = Config.of(**SMALL, init_from=tmp_path / "first" / "checkpoints" / "step_00000005")
    prepared = Trainer(config=config, quiet=True).prepare()
    parts = build_parts(config, prepared.plan, prepared.task, World.single_process())
    progress = restore_checkpoint(
        config,
        parts.state,
        CheckpointStore(tmp_path / "second"),
        World.single_process(),
        EventLog(tmp_path / "events.jsonl"),
    )
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
def test_other_sizes_are_refused_in_words(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    run(tmp_path / "run", max_steps=2)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", max_steps=4, resume="auto", **settings)


def test_checkpoints_are_keyed_by_expert(tmp_path: Path) -> None:
    run(tmp_path / "run", max_steps=2)
    found, _ = CheckpointStore(tmp_path / "run" / "checkpoints").newest_good()
    assert found is not None
    names = set(found[1].tensors["model"])
    assert {
        "blocks.0.ffn.bank.0.up",
        "blocks.0.ffn.bank.1.down",
        "blocks.0.ffn.bank.2.up",
        "blocks.0.ffn.load_E",
    } <= names
    assert {"exp_avg/blocks.0.ffn.bank.1.up", "step/blocks.0.ffn.bank.1.up", "exp_avg_sq/stem.weight"} <= set(
        found[1].tensors["optimizer"]
    )
    assert not [name for name in names if "module." in name or "_orig_mod" in name]


def test_sgd_with_momentum_resumes_too(tmp_path: Path) -> None:
    from orchestrator.tasks.digits import Digits

    class WithSgd(Digits):
        def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)

        def schedule(self) -> Any:
            return lambda step: 0.99**step

    task = WithSgd(Config.of(**SMALL))
    _, losses = run(tmp_path / "whole", task, max_steps=12)
    run(tmp_path / "parts", task, max_steps=5)
    _, resumed = run(tmp_path / "parts", task, max_steps=12, resume="auto")
    assert resumed == losses
