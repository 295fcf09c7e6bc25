"""Writes checkpoints in the background.

The loop waits only for a copy of the state in host memory; a thread writes it to disk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from safetensors import SafetensorError

from orchestrator.record.log import Log
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.files import Contents
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.parts.world import World


@dataclass(frozen=True)
class _Write:
    """A checkpoint that the thread is writing."""

    step: int
    began_s: float
    stall_s: float
    """How long the loop waited for the copy."""
    path: Future[Path]


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    All workers call it at the same steps; the main one writes."""

    def __init__(self, store: CheckpointStore, state: TrainState, world: World, log: Log) -> None:
        self._store = store
        self._state = state
        self._world = world
        self._log = log
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write: _Write | None = None
        self._num_waits = 0
        self.durable_step = -1
        """The newest step that is known to be on disk."""

    def save(self, progress: Progress) -> None:
        """Copy the state and start to write it.

        Waits while the checkpoint before is still being written."""
        began_s = perf_counter()
        self._finish_write()
        # The main worker may have waited for its disk, then copies for long: the others wait
        # without a time limit.
        self._wait_for_main()
        contents = capture(self._state, progress, self._world)
        self._wait_for_main()
        if contents is None:
            self.durable_step = progress.step  # the main worker checks its own write
            return
        path = self._thread.submit(self._save, progress.step, contents, progress.best_step)
        self._write = _Write(progress.step, began_s, perf_counter() - began_s, path)

    def poll(self) -> None:
        """Record a checkpoint that has reached the disk meanwhile."""
        if self._write is not None and self._write.path.done():
            self._finish_write()

    def finish(self) -> None:
        """Wait for the last checkpoint."""
        self._finish_write()
        self._wait_for_main()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _save(self, step: int, contents: Contents, best_step: int | None) -> Path:
        path = self._store.save(step, contents)
        self._store.retain(best_step)
        return path

    def _finish_write(self) -> None:
        """Wait for the write in progress and record it.

        A ``checkpoint`` event is a promise that it is on disk. A checkpoint that cannot be
        written (a full disk) is a warning: the older ones remain, and the next may fit."""
        write = self._write
        self._write = None
        if write is None:
            return
        try:
            path = write.path.result()
        except (OSError, SafetensorError) as error:
            message = f"step {write.step} could not be saved: {error}; free space on the disk"
            self._log.write("warning", kind="checkpoint", message=message)
            return
        self.durable_step = write.step
        self._log.write(
            "checkpoint",
            step=write.step,
            path=f"checkpoints/{path.name}",
            bytes=_folder_bytes(path),
            seconds=perf_counter() - write.began_s,
            stall=write.stall_s,
        )

    def _wait_for_main(self) -> None:
        # Each wait needs a name of its own in the life of the group.
        self._num_waits += 1
        self._world.wait_for_main(f"save/{self._num_waits}")


def _folder_bytes(path: Path) -> int:
    """Return the size of a checkpoint; 0 if a later one has replaced it already."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0
