"""Peak memory of a worker over a run, its parts, and a warning when memory is never freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from orchestrator.record.events.kinds import Memory
from orchestrator.train.device.memory import allocated_now, peak_memory, reset_peak
from orchestrator.train.group.world import World
from orchestrator.train.loop.training import Training
from orchestrator.types import MEMORY_PARTS

_LEAK_EPOCHS = 4
_LEAK_GROWTH = 1.01  # from one epoch to the next; less is noise of the allocator


class MemoryWatch:
    """Tracks a worker's memory from epoch to epoch."""

    def __init__(self, world: World, find_parts: Callable[[], Mapping[str, int]] = dict) -> None:
        """``find_parts`` returns the bytes of the known parts of this worker's memory."""
        self._world = world
        self._find_parts = find_parts
        self._run_peak: dict[str, int] = {}
        self._run_record: Memory | None = None
        self._bytes_after_epochs: list[int] = []

    def start_epoch(self) -> None:
        """Start a new measurement of the peak. The peak so far stays in ``run_peak``."""
        self.run_peak()
        reset_peak(self._world.device)

    def run_peak(self) -> dict[str, int]:
        """Return this worker's peak memory over the run so far, evaluation included."""
        current = peak_memory(self._world.device)
        for name, value in current.items():
            self._run_peak[name] = max(value, self._run_peak.get(name, 0))
        return self._run_peak

    def epoch_peak(self) -> Memory:
        """Return the peak memory of this epoch, of the worker that used most, and the parts of it.

        All workers must call it."""
        return self._largest(peak_memory(self._world.device))

    def end_run(self) -> None:
        """Find the worker that used most over the run, for ``run_record``. All workers must call it."""
        self._run_record = self._largest(self.run_peak())

    def run_record(self) -> Memory:
        """Return the peak memory of the run like ``epoch_peak``; of this worker before ``end_run``."""
        return self._run_record or Memory(**self.run_peak(), parts=self._parts(self.run_peak()))

    def _largest(self, peak: Mapping[str, int]) -> Memory:
        by_worker = self._world.gather_values({**peak, "parts": self._parts(peak)})
        largest = max(by_worker, key=lambda memory: memory["allocated"])
        # The caching allocator may have reserved most on another worker.
        reserved = max(memory["reserved"] for memory in by_worker)
        worker = by_worker.index(largest) if len(by_worker) > 1 else None
        return Memory(largest["allocated"], reserved, largest["parts"], worker)

    def _parts(self, peak: Mapping[str, int]) -> dict[str, int]:
        known = self._find_parts()
        parts = {name: known[name] for name in MEMORY_PARTS if known.get(name)}
        if self._world.device.type == "cuda":
            # A process on a CPU also holds the interpreter and its libraries: there is no such rest.
            parts["activations"] = max(0, peak["allocated"] - sum(parts.values()))
        return parts

    def leak_warning(self) -> str | None:
        """Return a warning if the memory in use has grown in each of the last four epochs."""
        self._bytes_after_epochs.append(allocated_now(self._world.device))
        last = self._bytes_after_epochs[-_LEAK_EPOCHS:]
        grows = all(later > earlier * _LEAK_GROWTH for earlier, later in pairwise(last))
        if len(last) < _LEAK_EPOCHS or not grows:
            return None
        return (
            f"allocated memory rose over four epochs, from {last[0]} to {last[-1]} bytes: "
            "the task keeps references to tensors"
        )


def known_parts(training: Training) -> dict[str, int]:
    """Return the bytes of a worker's state, buffers and data on its device, by the names of
    ``MEMORY_PARTS``.

    The state is as measured after an update; without one, as it is now."""
    stepper = training.stepper
    parts = dict(stepper.state_memory.parts or stepper.memory_parts())
    feeds = [training.feed] if training.evaluation is None else [training.feed, training.evaluation.feed]
    parts["data"] = sum(feed.bytes_on_device for feed in feeds)
    if stepper.world.device.type == "cpu":
        # Beside a GPU these buffers are in host memory.
        parts["buffers"] += training.checkpoints.buffer_bytes
        if training.snapshots is not None:
            parts["buffers"] += training.snapshots.buffer_bytes
    return parts
