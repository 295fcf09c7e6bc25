"""The peak of a GPU's memory in one step: the peak of each phase, and the tensors alive at the highest one,
by the lines that allocated them. Layers of compiled code count as one line."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import markdown_table
from orchestrator.train.device.clock import PhaseClock
from orchestrator.train.stepper import Stepper
from orchestrator.types import GIB

BEFORE = "before the step"
OTHER = "other code"
_MOST_LINES = 15
_MAX_CODE = 100  # characters of a line of compiled code
_ROOT = str(Path(__file__).parents[2])
_GENERATED = "/torchinductor_"


class PhasePeaks(PhaseClock):
    """Takes the peak of memory at the end of each phase in place of its time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.peaks: dict[str, int] = {}
        torch.cuda.reset_peak_memory_stats(device)

    def mark(self, phase: str) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        self.peaks[phase] = max(peak, self.peaks.get(phase, 0))
        torch.cuda.reset_peak_memory_stats(self._device)


def memory_report(run: Callable[[], None], stepper: Stepper, device: torch.device) -> str:
    """Do one step and return the tables of its peak."""
    before = torch.cuda.memory_allocated(device)
    state = stepper.memory_parts()
    clock = stepper.clock
    stepper.clock = peaks = PhasePeaks(device)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        run()
        snapshot: Any = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        stepper.clock = clock
    alive = alive_at_peak(snapshot["device_traces"][device.index or 0], before)
    text = f"\nMemory of one step: {_gib(sum(alive.values()))} GiB at its peak. The state before it, GiB: "
    text += ", ".join(f"{name} {_gib(size)}" for name, size in state.items()) + ".\n\n"
    text += markdown_table(("phase", "peak GiB"), [(name, _gib(size)) for name, size in peaks.peaks.items()])
    lines = [(_gib(size), place.replace("|", "/")) for place, size in alive.most_common(_MOST_LINES)]
    return text + "\n" + markdown_table(("GiB at the peak", "allocated by"), lines)


def alive_at_peak(trace: Sequence[Mapping[str, Any]], before: int) -> Counter[str]:
    """Return the bytes that were alive at the peak of a trace of torch's allocator, by place.

    ``before`` are the bytes that were allocated when the trace began."""
    signs = {"alloc": 1, "free_requested": -1}
    changes = [signs.get(event["action"], 0) * event["size"] for event in trace]
    totals = list(accumulate(changes, initial=before))
    alive: Counter[str] = Counter({BEFORE: before})
    place_of_address: dict[int, str] = {}
    for event, change in zip(trace[: totals.index(max(totals))], changes, strict=False):
        if change > 0:
            place_of_address[event["addr"]] = place_of(event["frames"])
        # Memory whose allocation is not in the trace is older than it.
        alive[place_of_address.get(event["addr"], BEFORE)] += change
    return +alive


def place_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost two lines of the project or of compiled code, the innermost first."""
    ours = [_describe(frame) for frame in frames if _is_ours(frame["filename"])]
    return " < ".join(ours[:2]) or OTHER


def _is_ours(filename: str) -> bool:
    return _GENERATED in filename or (filename.startswith(_ROOT) and "site-packages" not in filename)


def _describe(frame: Mapping[str, Any]) -> str:
    filename, line = frame["filename"], frame["line"]
    if _GENERATED not in filename:
        return f"{Path(filename).relative_to(_ROOT)}:{line} {frame['name']}"
    code = linecache.getline(filename, line).strip() or f"{filename}:{line}"
    return "`" + re.sub(r"\b(buf|primals_|arg)\d+", r"\1", code)[:_MAX_CODE] + "`"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
