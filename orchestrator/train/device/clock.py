"""Seconds of work on a device.

Those of the phases of a step are measured without making the host wait for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

_SAMPLE_EVERY = 10  # steps; timers of the device cost microseconds each, so a tenth of the steps carry them


class PhaseClock:
    """Mean seconds per phase.

    ``begin`` a step, ``mark`` the end of each phase, ``end`` the step; ``take`` the means.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._last_mark = 0.0
        self._step_start = 0.0

    def begin(self) -> None:
        now = perf_counter()
        self._step_start = now
        self._last_mark = now

    def mark(self, phase: str) -> None:
        now = perf_counter()
        self._sums[phase] += now - self._last_mark
        self._last_mark = now

    def end(self) -> float:
        """End the step; return its seconds on the host."""
        self._steps += 1
        seconds = perf_counter() - self._step_start
        self._sums["total"] += seconds
        return seconds

    def take(self) -> dict[str, float]:
        """Return the steps since the last call and mean seconds per phase; empty if no step ended."""
        steps = self._steps
        sums = self._sums
        self._steps = 0
        self._sums = defaultdict(float)
        if not steps:
            return {}
        means = {name: value / steps for name, value in sums.items()}
        return {"steps": steps, **means}


class DevicePhaseClock(PhaseClock):
    """A phase clock for a GPU.

    The data phase is a wait of the host. The other phases are timed by events on the device, in a
    sample of the steps. The events are read in ``take``, when the losses are fetched and the host
    has waited for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream(device)
        self._steps_begun = 0
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._sampled_steps: list[list[tuple[str, torch.cuda.Event]]] = []

    def begin(self) -> None:
        super().begin()
        self._steps_begun += 1
        self._events = []

    def mark(self, phase: str) -> None:
        if phase == "data":
            super().mark(phase)
        else:
            self._last_mark = perf_counter()
        if self._steps_begun % _SAMPLE_EVERY == 1:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append((phase, event))

    def end(self) -> float:
        if self._events:
            self._sampled_steps.append(self._events)
        return super().end()

    def take(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for events in self._sampled_steps:
            events[-1][1].synchronize()
            for (_, before), (phase, after) in pairwise(events):
                sums[phase] += before.elapsed_time(after) / 1e3
        num_sampled = len(self._sampled_steps)
        self._sampled_steps = []
        means = super().take()
        if means and num_sampled:
            means |= {phase: value / num_sampled for phase, value in sums.items() if phase != "data"}
        return means


def synchronize(device: torch.device | None) -> None:
    """Wait until the device has finished its work. A CPU has finished when a call returns."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_seconds(run: Callable[[], Any], device: torch.device | None) -> float:
    """Run work and return the seconds until the device has finished it.

    The device should be idle before: earlier work would count too.
    """
    start = perf_counter()
    run()
    synchronize(device)
    return perf_counter() - start
