"""Checkpoints of families of ``transformers``, which hosts over gloo train and write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.record.log import SilentLog
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from tests.support.families import BIASED_FAMILIES, FamilyTask
from tests.support.family_runs import CPU, GLOBAL_BATCH, placement
from tests.support.planted_faults import step_batches
from tests.support.steppers import make_stepper

STEPS = 2
BIAS_RATE = 0.01


def save_families(rank: int, size: int, store: str, names: Sequence[str], folder: str) -> None:
    """Train each family for two steps, and save it below ``folder`` under its name."""
    for name in names:
        path = f"{store}-{names.index(name)}"
        with process_group_world(file_store(path, size), rank, size, CPU, "gloo", 60) as world:
            save_trained(name, world, Path(folder) / name)


def save_trained(name: str, world: World, folder: Path) -> None:
    """Train a family on the hosts of a world, and write a checkpoint."""
    host_of = placement(name, world.size)
    task = FamilyTask(name, bias_rate=BIAS_RATE if name in BIASED_FAMILIES else 0.0)
    stepper, feed = make_stepper(task, 2, GLOBAL_BATCH, 1e-2, world=world, host_of=host_of)
    for step, batch in enumerate(step_batches(feed, STEPS)):
        stepper.run(batch, step)
    state = TrainState(stepper.strategy.model, stepper.optimizer.inner, stepper.precision)
    writer = CheckpointWriter(CheckpointStore(folder, repair=world.is_main), state, world, SilentLog())
    writer.save(Progress(step=STEPS))
    writer.finish()
    writer.close()


def checkpoint_of(folder: Path, name: str) -> Path:
    """Return the checkpoint of a family."""
    ((_, path),) = CheckpointStore(folder / name, repair=False).newest_first()
    return path
