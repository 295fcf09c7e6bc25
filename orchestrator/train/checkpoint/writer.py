"""Checkpoints without holding up the loop: the state is copied to host memory, and a thread writes it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from orchestrator.record.log import Log
from orchestrator.train.checkpoint.state import Progress, capture
from orchestrator.train.checkpoint.store import CheckpointStore, Contents
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World


@dataclass(frozen=True)
class _UnderWay:
    step: int
    begun: float
    stall: float
    done: Future[Path]


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time. All workers call it at the same steps; the main one writes."""

    store: CheckpointStore
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    world: World
    log: Log
    durable: int = -1
    """The newest step that is known to be on disk."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    _under_way: _UnderWay | None = None
    _meetings: int = 0

    def save(self, progress: Progress) -> None:
        """Copy the state and begin to write it. Waits where the one before is still being written."""
        begun = perf_counter()
        self._settle()
        self._meet()
        contents = capture(self.model, self.optimizer, self.precision, progress, self.world)
        self._meet()
        if contents is None:
            self.durable = progress.step  # the main worker's to see to
            return
        done = self._thread.submit(self._write, progress.step, contents, progress.best_step)
        self._under_way = _UnderWay(progress.step, begun, perf_counter() - begun, done)

    def poll(self) -> None:
        """Tell of a checkpoint that has been written meanwhile."""
        if self._under_way is not None and self._under_way.done.done():
            self._settle()

    def finish(self) -> None:
        """Wait for the last one."""
        self._settle()
        self._meet()

    def _meet(self) -> None:
        self._meetings += 1
        self.world.wait_for_main(f"save/{self._meetings}")

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _write(self, step: int, contents: Contents, best: int | None) -> Path:
        path = self.store.save(step, contents)
        self.store.retain(best)
        return path

    def _settle(self) -> None:
        """An event of a checkpoint is a promise: written when it is on disk. One that cannot be written (a full disk) is a
        warning; the older ones stand, and the next may fit."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            path = under_way.done.result()
        except (OSError, SafetensorError) as error:
            message = f"step {under_way.step} could not be saved: {error}; make room on the disk"
            self.log.write("warning", kind="checkpoint", message=message)
            return
        self.durable = under_way.step
        fields: dict[str, Any] = {
            "bytes": _size(path),
            "seconds": perf_counter() - under_way.begun,
            "stall": under_way.stall,
        }
        self.log.write("checkpoint", step=under_way.step, path=f"checkpoints/{path.name}", **fields)


def _size(path: Path) -> int:
    """Bytes of a checkpoint; a later one may have pushed it out already."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0
