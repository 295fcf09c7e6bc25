"""Where the time of a step goes, without making the host wait for the device."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from time import perf_counter

import torch

PHASES = ("data", "forward", "backward", "optimizer")
_SAMPLE_EVERY = 10  # device timers cost microseconds each: a tenth of the steps carry them


class PhaseClock:
    """``begin`` a step, ``mark`` the end of each phase, ``end`` it; ``take`` the means since the last taking."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._last = 0.0
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = self._last = perf_counter()

    def mark(self, phase: str) -> None:
        now = perf_counter()
        self._sums[phase] += now - self._last
        self._last = now

    def end(self) -> float:
        """Closes the step; returns its seconds on the host."""
        self._steps += 1
        seconds = perf_counter() - self._begun
        self._sums["total"] += seconds
        return seconds

    def take(self) -> dict[str, float]:
        """Mean seconds per step and phase; empty when no step ended."""
        steps, sums = self._steps, self._sums
        self._steps, self._sums = 0, defaultdict(float)
        return {"steps": steps, **{name: value / steps for name, value in sums.items()}} if steps else {}


class DevicePhaseClock(PhaseClock):
    """The same on a GPU: data is a wait of the host, the rest is timed by events on the device, on a sample of steps,
    and read when the losses are fetched and the device has been waited for anyway."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream(device)
        self._count = 0
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._sampled: list[list[tuple[str, torch.cuda.Event]]] = []

    def begin(self) -> None:
        super().begin()
        self._count += 1
        self._events = []

    def mark(self, phase: str) -> None:
        if phase == "data":
            super().mark(phase)
        else:
            self._last = perf_counter()
        if self._count % _SAMPLE_EVERY == 1:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append((phase, event))

    def end(self) -> float:
        if self._events:
            self._sampled.append(self._events)
        return super().end()

    def take(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for events in self._sampled:
            events[-1][1].synchronize()
            for (_, before), (phase, after) in pairwise(events):
                sums[phase] += before.elapsed_time(after) / 1e3
        sampled, self._sampled = len(self._sampled), []
        means = super().take()
        return (
            means | {phase: value / sampled for phase, value in sums.items() if phase != "data"}
            if means and sampled
            else means
        )
