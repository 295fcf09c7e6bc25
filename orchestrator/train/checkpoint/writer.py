"""Writes checkpoints in the background.

The loop waits only for a copy of its host's part in host memory. A thread of each host writes the
part to disk, and the main host's thread publishes the checkpoint when all parts are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from orchestrator.checkpoint.hashed_file import no_progress
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.train.checkpoint.capture import Captured, capture, host_share
from orchestrator.train.checkpoint.host_save import CloseDeadline, HostSave, Published, SaveFailed
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.group.world import World

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class _Write:
    """A checkpoint that the thread is writing."""

    step: int
    began_s: float
    stall_s: float
    """How long the loop waited for the copies of all hosts."""
    written: threading.Event
    """Set when this host's own files are written."""
    result: Future[Published | None]


class NoCheckpoints:
    """Takes the place of a ``CheckpointWriter`` where steps are only compared with a record."""

    durable_step = -1
    buffer_bytes = 0

    def save(self, progress: Progress) -> None:
        self.durable_step = progress.step

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time. All workers call it at the same steps."""

    def __init__(
        self,
        store: CheckpointStore,
        state: TrainState,
        world: World,
        log: Log,
        progress: Callable[[], None] = no_progress,
    ) -> None:
        """``progress`` is called for every piece of work that the loop waits for."""
        self._store = store
        self._state = state
        self._world = world
        self._log = log
        self._progress = progress
        self._thread = ThreadPoolExecutor(1, f"checkpoint-{world.rank}")
        # One buffer: a second save waits until the first is written.
        self._buffers = PinnedBuffers(world.device, num_buffers=1)
        self._buffers_prepared = False
        self._closing = CloseDeadline()
        self._write: _Write | None = None
        self._num_pieces = 0
        """Pieces that the thread has written."""
        self._num_waits = 0
        self.durable_step = -1
        """The newest step that is known to be on disk."""

    def save(self, progress: Progress) -> None:
        """Copy the state and start to write it.

        Waits while the checkpoint before is still being written by any host."""
        began_s = perf_counter()
        self._finish_write()
        # The main worker may have waited for a disk, then all copy for long: the waits for each
        # other have no time limit.
        folder = self._begin_on_main(progress.step)
        if not self._world.is_main:
            self.durable_step = progress.step  # the main worker checks what all have written
        if folder is None:
            return
        captured = capture(self._state, progress, self._world, self._buffers, self._progress)
        self._world.wait_for_all(self._next_name())
        self._start_write(progress, folder, captured, began_s)

    def poll(self) -> None:
        """Record a checkpoint that has reached the disk meanwhile. Called after each step."""
        self._prepare_buffers()
        if self._write is not None and self._write.result.done():
            self._finish_write()

    def finish(self) -> None:
        """Wait for the last checkpoint."""
        self._finish_write()
        self._world.wait_for_main(self._next_name())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that the state is copied into, in host memory."""
        return self._buffers.num_bytes

    def close(self) -> None:
        self._closing.begin()
        self._thread.shutdown(wait=True)
        self._buffers.close()

    def _prepare_buffers(self) -> None:
        """Allocate pinned memory in the background, once the optimizer has its state."""
        if self._buffers_prepared or self._world.device.type != "cuda":
            return
        self._buffers_prepared = True
        self._buffers.prepare(host_share(self._state, self._world).num_bytes)

    def _begin_on_main(self, step: int) -> Path | None:
        """Return the folder that this host writes into, or None if the main host cannot create it."""
        name: str | None = None
        if self._world.is_main:
            try:
                name = self._store.begin(step).name
            except OSError as error:
                self._warn(step, f"{error}; free space on the disk")
        name = self._world.wait_for_main(self._next_name(), name)
        return self._store.part_folder(name) if name is not None else None

    def _start_write(self, progress: Progress, folder: Path, captured: Captured, began_s: float) -> None:
        save = HostSave(
            name=f"save/{self._num_waits}",
            step=progress.step,
            best_step=progress.best_step,
            folder=folder,
            store=self._store,
            world=self._world,
            closing=self._closing,
            written=threading.Event(),
        )
        result = self._thread.submit(save.run, captured, self._count_piece)
        stall_s = perf_counter() - began_s
        self._write = _Write(progress.step, began_s, stall_s, save.written, result)

    def _count_piece(self) -> None:
        self._num_pieces += 1

    def _finish_write(self) -> None:
        """Wait for the write in progress and record it.

        A ``checkpoint`` event is a promise that it is on disk. A checkpoint that cannot be
        written (a full disk) is a warning: the older ones remain, and the next may fit."""
        write = self._write
        self._write = None
        if write is None:
            return
        self._wait_for(write)
        try:
            published = write.result.result()
        except SaveFailed as error:
            self._warn(write.step, str(error))
            return
        if published is None:
            return
        self.durable_step = write.step
        self._log.write(
            kinds.Checkpoint(
                step=write.step,
                path=f"checkpoints/{published.path.name}",
                bytes=published.num_bytes,
                seconds=perf_counter() - write.began_s,
                stall=write.stall_s,
            )
        )

    def _wait_for(self, write: _Write) -> None:
        """Wait for a write, or until the group is left.

        Only the pieces of this host's own files are its progress. Then it waits for its peers."""
        membership = self._world.membership
        num_pieces = self._num_pieces
        while not write.written.wait(_POLL_SECONDS) and not write.result.done():
            membership.check()
            if self._num_pieces != num_pieces:
                num_pieces = self._num_pieces
                self._progress()
        membership.wait_until(write.result.done)

    def _warn(self, step: int, reason: str) -> None:
        self._log.write(kinds.Warned(kind="checkpoint", message=f"step {step} could not be saved: {reason}"))

    def _next_name(self) -> str:
        # Each wait needs a name of its own in the life of the group.
        self._num_waits += 1
        return f"save/{self._num_waits}"
