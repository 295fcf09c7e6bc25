"""Scripts that save checkpoints, for ``tests/support/crash_injection.py``: what each has promised after every word of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from orchestrator.train.checkpoint.files import Contents
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World

KEEP = 2
Tell = Callable[[int | None], None]
Steps = frozenset[int]


@dataclass(frozen=True)
class Story:
    """A script by name, what lies in its folder before, and the steps that must be there at first and after each of its words."""

    script: str
    promises: tuple[Steps, ...]
    prepare: Callable[[Path], object]
    best: int | None = None
    lasting: Steps = frozenset()
    """Of what lies there before, what is not to be put away."""
    numbers: tuple[tuple[int, int], ...] = ()
    """The step and the number of each save that is told of, in this order."""

    @property
    def full_name(self) -> str:
        return f"{__name__}:{self.script}"


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def contents(step: int, number: int = 0) -> Contents:
    """Of the save of that ``number``: the same step may be saved again, with something else."""
    generator = torch.Generator().manual_seed(step + number)
    tensors = {
        "model": {"w": torch.randn(5, 7, generator=generator)},
        "optimizer": {"exp_avg/w": torch.full((3,), step)},
    }
    return Contents(tensors, {"progress": {"step": step, "samples": number}})


def number_of(state: Any) -> int:
    """Which save a checkpoint is of."""
    return state["progress"].get("samples", 0)


def _save(store: CheckpointStore, step: int, best: int | None, tell: Tell, number: int = 1) -> None:
    try:
        store.save(step, contents(step, number))
    except (OSError, SafetensorError):
        tell(None)
        return
    tell(step)
    store.retain(best)


# --- a new run, with a best step that changes, and a step that is saved again


SAVES: tuple[tuple[int, int | None], ...] = ((10, None), (20, 10), (30, 10), (30, 10), (40, 30))


def _kept(saves: tuple[tuple[int, int | None], ...]) -> tuple[Steps, ...]:
    """The rule of retention: the newest two and the best."""
    kept: list[set[int]] = [set()]
    for step, best in saves:
        there = kept[-1] | {step}
        kept.append({*sorted(there)[-KEEP:], *(old for old in there if old == best)})
    return tuple(frozenset(steps) for steps in kept)


def by_the_store(folder: Path, tell: Tell) -> None:
    """Told as soon as ``save`` returns, before older ones go."""
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    for number, (step, best) in enumerate(SAVES, 1):
        _save(store, step, best, tell, number)


class _Told:
    """A log whose events of checkpoints are the script's word."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def write(self, event: str, **fields: Any) -> None:
        self.tell(fields["step"] if event == "checkpoint" else None)

    def write_all(self, events: Any) -> None:
        raise AssertionError(events)

    def close(self) -> None: ...


def by_the_saver(folder: Path, tell: Tell) -> None:
    """As a run does it: copied by the loop, written by a thread, told by an event."""
    saver = CheckpointWriter(
        store=CheckpointStore(checkpoints(folder), keep=KEEP),
        state=TrainState(_MODEL, _OPTIMIZER, Precision("fp32", torch.device("cpu"))),
        world=World.single_process(),
        log=_Told(tell),
    )
    for number, (step, best) in enumerate(SAVES, 1):
        saver.save(Progress(step=step, best_step=best, samples=number))
    saver.finish()
    saver.close()


_MODEL = nn.Linear(3, 2)  # made before the fork: the first optimizer of a process takes its time
_OPTIMIZER = torch.optim.SGD(_MODEL.parameters(), momentum=0.9)


# --- a run that was killed in the midst of a save, and goes on


def _three(folder: Path) -> CheckpointStore:
    store = CheckpointStore(checkpoints(folder), keep=3)
    for step in (10, 20, 30):
        store.save(step, contents(step))
    return store


def _leave_traces(folder: Path) -> None:
    """Step 30 had made room for another; step 20 had been saved anew, and the older one was half removed; more of the kind."""
    at = _three(folder).folder
    (at / "step_00000030").rename(at / ".replaced_step_00000030")
    for name in (".replaced_step_00000020", ".writing_step_00000040", ".removing_step_00000010"):
        shutil.copytree(at / "step_00000020", at / name)
        (at / name / "manifest.json").unlink()


def mended(folder: Path, tell: Tell) -> None:
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    tell(30)
    _save(store, 30, None, tell)
    _save(store, 40, None, tell)


def resumed(folder: Path, tell: Tell) -> None:
    """From an older step: the later ones are put away."""
    store = CheckpointStore(checkpoints(folder), keep=KEEP)
    try:
        store.set_aside_after(10)
    except OSError:
        return  # the run ends there
    tell(10)
    _save(store, 15, None, tell)
    _save(store, 20, None, tell)


def _steps(*promises: set[int]) -> tuple[Steps, ...]:
    return tuple(frozenset(steps) for steps in promises)


_NUMBERED = tuple((step, number) for number, (step, _) in enumerate(SAVES, 1))
STORIES = (
    Story("by_the_store", _kept(SAVES), Path.mkdir, best=30, numbers=_NUMBERED),
    Story("by_the_saver", _kept(SAVES), Path.mkdir, best=30, numbers=_NUMBERED),
    Story(
        "mended",
        _steps({20, 30}, {20, 30}, {20, 30}, {30, 40}),
        _leave_traces,
        None,
        frozenset({20, 30}),
        ((30, 0), (30, 1), (40, 1)),
    ),
    Story(
        "resumed",
        _steps({10, 20, 30}, {10}, {10, 15}, {15, 20}),
        _three,
        None,
        frozenset({10}),
        ((10, 0), (15, 1), (20, 1)),
    ),
)
