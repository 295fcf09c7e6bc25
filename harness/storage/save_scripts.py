"""Scripts that save checkpoints, to be crashed, and the steps that each must keep."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.hosts.save_hosts import RecordingLog, SaveHost, make_hosts, run_hosts
from harness.storage.checkpoints import save_checkpoint
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.events.kinds import Checkpoint, Event
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World

KEEP = 2
Acknowledge = Callable[[int | None], None]
Steps = frozenset[int]


@dataclass(frozen=True)
class SaveScript:
    """A script, what is in its folder before it, and the steps that must be there at any time."""

    name: str
    promises: tuple[Steps, ...]
    """The steps that must be there at first, and after each acknowledgement."""
    prepare: Callable[[Path], object]
    best: int | None = None
    lasting: Steps = frozenset()
    """Steps in the folder before the script that it does not set aside."""
    saves: tuple[tuple[int, int], ...] = ()
    """The step and the number of each save that is acknowledged, in this order."""

    @property
    def full_name(self) -> str:
        return f"{__name__}:{self.name}"


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def contents(step: int, number: int = 0) -> Contents:
    """Return the contents of save ``number``: a step may be saved again with other tensors."""
    generator = torch.Generator().manual_seed(step + number)
    tensors = {
        "model": {"w": torch.randn(5, 7, generator=generator)},
        "optimizer": {"exp_avg/w": torch.full((3,), step)},
    }
    return Contents(tensors, {"progress": {"step": step, "samples": number}})


def save_number(state: Mapping[str, Any]) -> int:
    """Return the number of the save that wrote a checkpoint."""
    return state["progress"].get("samples", 0)


def _save(
    store: CheckpointStore,
    step: int,
    best: int | None,
    acknowledge: Acknowledge,
    number: int = 1,
) -> None:
    try:
        save_checkpoint(store, step, contents(step, number))
    except OSError:
        acknowledge(None)
        return
    acknowledge(step)
    store.retain(best)


# A new run whose best step changes, and which saves one step again

SAVES: tuple[tuple[int, int | None], ...] = (
    (10, None),
    (20, 10),
    (30, 10),
    (30, 10),
    (40, 30),
)
"""The step and the best step at each save."""
HOST_SAVES: tuple[tuple[int, int | None], ...] = ((10, None), (20, 10), (20, 10))
"""The same for three hosts, each of which has files of its own to write."""


def _retained(saves: tuple[tuple[int, int | None], ...]) -> tuple[Steps, ...]:
    """Return the steps that retention keeps after each save: the newest two and the best."""
    retained: list[set[int]] = [set()]
    for step, best in saves:
        present = retained[-1] | {step}
        newest = sorted(present)[-KEEP:]
        retained.append({*newest, *(present & {best})})
    return tuple(frozenset(steps) for steps in retained)


def save_with_store(folder: Path, acknowledge: Acknowledge) -> None:
    """Acknowledge each save as soon as it returns, before older checkpoints go."""
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    for number, (step, best) in enumerate(SAVES, 1):
        _save(store, step, best, acknowledge, number)


def _acknowledging_log(acknowledge: Acknowledge) -> RecordingLog:
    """Return a log whose ``checkpoint`` events acknowledge the saves."""

    def write(event: Event) -> None:
        acknowledge(event.step if isinstance(event, Checkpoint) else None)

    return RecordingLog(write)


def save_with_writer(folder: Path, acknowledge: Acknowledge) -> None:
    """Save as a run does: copied by the loop, written by a thread, acknowledged by an event."""
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    state = TrainState(_MODEL, _OPTIMIZER, Precision("fp32", torch.device("cpu")))
    writer = CheckpointWriter(store, state, World.single_process(), _acknowledging_log(acknowledge))
    for number, (step, best) in enumerate(SAVES, 1):
        writer.save(Progress(step=step, best_step=best, samples=number))
    writer.finish()
    writer.close()


def save_with_hosts(folder: Path, acknowledge: Acknowledge) -> None:
    """Save as three hosts do, each from threads of its own. All of them are killed at once."""
    hosts = make_hosts(3, checkpoints(folder), KEEP)
    hosts[0].log = _acknowledging_log(acknowledge)

    def save_all(host: SaveHost) -> None:
        writer = host.open_writer()
        for number, (step, best) in enumerate(HOST_SAVES, 1):
            writer.save(Progress(step=step, best_step=best, samples=number))
        writer.finish()
        writer.close()

    assert run_hosts(hosts, save_all) == [None] * len(hosts)


# Made before the fork: the first optimizer of a process takes long.
_MODEL = nn.Linear(3, 2)
_OPTIMIZER = torch.optim.SGD(_MODEL.parameters(), momentum=0.9)


# A run that was killed during a save, and resumes


def _three_checkpoints(folder: Path) -> CheckpointStore:
    store = CheckpointStore(checkpoints(folder), keep=3)
    for step in (10, 20, 30):
        save_checkpoint(store, step, contents(step))
    return store


def _remains_of_killed_saves(folder: Path) -> None:
    """Step 30 was being replaced.

    Step 20 was replaced, and its predecessor half removed. Others were half done."""
    path = _three_checkpoints(folder).folder
    (path / "step_00000030").rename(path / ".replaced_step_00000030")
    for name in (
        ".replaced_step_00000020",
        ".writing_step_00000040_0123abcd",
        ".removing_step_00000010",
    ):
        shutil.copytree(path / "step_00000020", path / name)
        (path / name / "manifest.json").unlink()


def repair_and_save(folder: Path, acknowledge: Acknowledge) -> None:
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    acknowledge(30)
    _save(store, 30, None, acknowledge)
    _save(store, 40, None, acknowledge)


def resume_and_save(folder: Path, acknowledge: Acknowledge) -> None:
    """Resume from an older step: the later ones are set aside."""
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    try:
        store.set_aside_after(10)
    except OSError:
        return  # the run ends there
    acknowledge(10)
    _save(store, 15, None, acknowledge)
    _save(store, 20, None, acknowledge)


def _steps(*promises: set[int]) -> tuple[Steps, ...]:
    return tuple(frozenset(steps) for steps in promises)


_NUMBERED_SAVES = tuple((step, number) for number, (step, _) in enumerate(SAVES, 1))
SCRIPTS = (
    SaveScript("save_with_store", _retained(SAVES), Path.mkdir, best=30, saves=_NUMBERED_SAVES),
    SaveScript("save_with_writer", _retained(SAVES), Path.mkdir, best=30, saves=_NUMBERED_SAVES),
    SaveScript(
        "save_with_hosts",
        _retained(HOST_SAVES),
        Path.mkdir,
        best=10,
        saves=tuple((step, number) for number, (step, _) in enumerate(HOST_SAVES, 1)),
    ),
    SaveScript(
        "repair_and_save",
        _steps({20, 30}, {20, 30}, {20, 30}, {30, 40}),
        _remains_of_killed_saves,
        lasting=frozenset({20, 30}),
        saves=((30, 0), (30, 1), (40, 1)),
    ),
    SaveScript(
        "resume_and_save",
        _steps({10, 20, 30}, {10}, {10, 15}, {15, 20}),
        _three_checkpoints,
        lasting=frozenset({10}),
        saves=((10, 0), (15, 1), (20, 1)),
    ),
)
