"""Peak memory of a worker over a run, and a warning when memory is never freed."""

from __future__ import annotations

from itertools import pairwise

from orchestrator.train.parts.memory import allocated_now, peak_memory, reset_peak
from orchestrator.train.parts.world import World

_LEAK_EPOCHS = 4
_LEAK_GROWTH = 1.01  # from one epoch to the next; less is noise of the allocator


class MemoryWatch:
    """Tracks a worker's memory from epoch to epoch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._run_peak: dict[str, int] = {}
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

    def epoch_peak(self) -> dict[str, int]:
        """Return the peak memory of this epoch, of the worker that used most.

        All workers must call it."""
        local_peak = peak_memory(self._world.device)
        global_peak = self._world.all_reduce_max(list(local_peak.values()))
        return {name: int(value) for name, value in zip(local_peak, global_peak, strict=True)}

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
