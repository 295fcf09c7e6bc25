"""The speed of a run: one definition for the summary, the report and the tables.

The first steps of a process compile, allocate and fill caches. Their events carry ``warm_up``, and
every rate and mean leaves them out, unless a run has no others.

A rate counts what was computed. A task with several units per sample, as the tokens of a language
model, computes that number for each sample, padding and tokens without a loss included; other tasks
count what their loss is a mean over. Plans and trials of a sweep count the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from orchestrator.record.events.kinds import Exchange, Phases, Step

W = TypeVar("W", Step, Phases, Exchange)

RECENT_STEPS = 50
"""The speed of a run that goes on is that of its last steps."""
MAX_EXACT_TIMES = 4096
"""Different times of steps from which on they are rounded."""


@dataclass(frozen=True)
class Speed:
    """Rates per second and times of a step, over the steps after the warm-up."""

    samples: float
    units: float
    """The same as the samples for a task that counts samples."""
    median_step_s: float
    mean_step_s: float
    num_steps: int
    num_warm_up: int
    """Steps that are left out."""

    @property
    def basis(self) -> str:
        """The steps that the figures speak of, for people."""
        counted = f"{self.num_steps} step{'s'[: self.num_steps != 1]}"
        return f"{counted}, without {self.num_warm_up} of warm-up" if self.num_warm_up else counted


def after_warm_up(events: Sequence[W]) -> list[W]:
    """Return the events of steps, phases or exchanges after the warm-up; all if there are no others."""
    return [event for event in events if not event.warm_up] or list(events)


def speed_of(steps: Iterable[Step]) -> Speed | None:
    """Return the speed by the events of a run's steps; None if none has a time."""
    sums = SpeedSums()
    for step in steps:
        sums.add(step)
    return sums.speed()


class SpeedSums:
    """The speed of a run, step by step."""

    def __init__(self) -> None:
        self._warm_up = _Sums()
        self._settled = _Sums()

    def add(self, step: Step) -> None:
        if step.seconds:
            sums = self._warm_up if step.warm_up else self._settled
            sums.add(step.seconds, step.samples or 0.0, step.units or 0.0)

    def speed(self) -> Speed | None:
        """Return the speed after the warm-up, or of the warm-up if there are no other steps."""
        counted = self._settled if self._settled.num_steps else self._warm_up
        if not counted.num_steps:
            return None
        return Speed(
            samples=counted.samples / counted.seconds,
            units=(counted.units or counted.samples) / counted.seconds,
            median_step_s=counted.times.median(),
            mean_step_s=counted.seconds / counted.num_steps,
            num_steps=counted.num_steps,
            num_warm_up=self._warm_up.num_steps if counted is self._settled else 0,
        )

    def to_json(self) -> list[Any]:
        return [self._warm_up.to_json(), self._settled.to_json()]

    def load(self, content: Sequence[Any]) -> None:
        """Continue from what ``to_json`` returned."""
        warm_up, settled = content
        self._warm_up.load(warm_up)
        self._settled.load(settled)


class _Sums:
    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.samples = 0.0
        self.units = 0.0
        self.times = _Times()

    def add(self, seconds: float, samples: float, units: float) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.samples += samples
        self.units += units
        self.times.add(seconds)

    def to_json(self) -> list[Any]:
        return [self.num_steps, self.seconds, self.samples, self.units, self.times.to_json()]

    def load(self, content: Sequence[Any]) -> None:
        num_steps, seconds, samples, units, times = content
        self.num_steps = int(num_steps)
        self.seconds = float(seconds)
        self.samples = float(samples)
        self.units = float(units)
        self.times.load(times)


class _Times:
    """How often each time occurred. Many different ones are rounded to four digits: their number is bounded,
    and the median is exact to 0.05 %."""

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._is_rounded = False

    def add(self, seconds: float, count: int = 1) -> None:
        key = _rounded(seconds) if self._is_rounded else seconds
        self._counts[key] = self._counts.get(key, 0) + count
        if not self._is_rounded and len(self._counts) > MAX_EXACT_TIMES:
            exact = self._counts
            self._counts = {}
            self._is_rounded = True
            for value, number in exact.items():
                self.add(value, number)

    def median(self) -> float:
        ordered = sorted(self._counts.items())
        positions = list(accumulate(count for _, count in ordered))
        middle = positions[-1] / 2
        low = ordered[bisect_left(positions, middle)][0]
        high = ordered[bisect_right(positions, middle)][0]
        return (low + high) / 2

    def to_json(self) -> list[Any]:
        return [self._is_rounded, list(self._counts.items())]

    def load(self, content: Sequence[Any]) -> None:
        is_rounded, counts = content
        self._is_rounded = bool(is_rounded)
        self._counts = {float(seconds): int(count) for seconds, count in counts}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
