"""Checkpoints of families of ``transformers``, which hosts over gloo train and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from experts.transformers.files.shards import fingerprint
from harness.lm.families import BIASED_FAMILIES, FamilyTask, build
from harness.lm.family_runs import CPU, GLOBAL_BATCH, placement
from harness.lm.lora_runs import LoraTask
from harness.runs.host_runs import step_batches
from harness.runs.steppers import make_stepper
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.files.log import SilentLog
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world

STEPS = 2
BIAS_RATE = 0.01


@dataclass(frozen=True)
class FrozenBaseTask(LoraTask):
    """A family with adapters, whose checkpoints hold the adapters alone."""

    base: str = ""
    """The folder with the frozen weights."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.frozen_base = fingerprint(Path(self.base))
        return model


def balanced_task(name: str) -> FamilyTask:
    """Return the task of a family, whose routing biases are updated where it has some."""
    return FamilyTask(name, bias_rate=BIAS_RATE if name in BIASED_FAMILIES else 0.0)


def save_families(
    rank: int, size: int, store: str, names: Sequence[str], folder: str, bases: str | None = None
) -> None:
    """Train each family for two steps, and save it below ``folder`` under its name.

    ``bases`` has the folders of the families, whose adapters are trained then."""
    for name in names:
        path = f"{store}-{names.index(name)}"
        task = balanced_task(name) if bases is None else FrozenBaseTask(name, base=f"{bases}/{name}")
        with process_group_world(file_store(path, size), rank, size, CPU, "gloo", 60) as world:
            save_trained(task, world, Path(folder) / name)


def save_trained(task: FamilyTask, world: World, folder: Path) -> None:
    """Train a family on the hosts of a world, and write a checkpoint."""
    host_of = placement(task.name, world.size)
    stepper, feed = make_stepper(task, 2, GLOBAL_BATCH, 1e-2, world=world, host_of=host_of)
    for step, batch in enumerate(step_batches(feed, STEPS)):
        stepper.run(batch, step)
    state = TrainState(stepper.strategy.model, stepper.optimizer.inner, stepper.precision)
    writer = CheckpointWriter(CheckpointStore(folder, repair=world.is_main), state, world, SilentLog())
    writer.save(Progress(step=STEPS))
    writer.finish()
    writer.close()


def save_model_folder(folder: Path, name: str, dtype: torch.dtype = torch.float64) -> Path:
    """Write a family as its users have it: with a tensor per expert, a tokenizer and a generation config."""
    model = build(name, dtype)
    model.config._experts_implementation = None
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    GenerationConfig(max_length=7).save_pretrained(folder)
    return folder


def checkpoint_of(folder: Path, name: str) -> Path:
    """Return the checkpoint of a family."""
    ((_, path),) = CheckpointStore(folder / name, repair=False).newest_first()
    return path
