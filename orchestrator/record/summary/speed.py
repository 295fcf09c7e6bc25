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
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, TypeVar

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


def _times(value: Any) -> dict[float, int]:
    """Return how often each time occurred: JSON has its numbers as text."""
    return {float(seconds): int(count) for seconds, count in value.items()}


@dataclass
class _Times:
    """How often each time occurred. Many different ones are rounded to four digits: their number is bounded,
    and the median is exact to 0.05 %."""

    counts: Annotated[dict[float, int], _times] = field(default_factory=dict)
    is_rounded: bool = False

    def add(self, seconds: float, count: int = 1) -> None:
        key = _rounded(seconds) if self.is_rounded else seconds
        self.counts[key] = self.counts.get(key, 0) + count
        if not self.is_rounded and len(self.counts) > MAX_EXACT_TIMES:
            exact = self.counts
            self.counts = {}
            self.is_rounded = True
            for value, number in exact.items():
                self.add(value, number)

    def median(self) -> float:
        ordered = sorted(self.counts.items())
        positions = list(accumulate(count for _, count in ordered))
        middle = positions[-1] / 2
        low = ordered[bisect_left(positions, middle)][0]
        high = ordered[bisect_right(positions, middle)][0]
        return (low + high) / 2


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


@dataclass
class _Sums:
    num_steps: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    units: float = 0.0
    times: _Times = field(default_factory=_Times)

    def add(self, seconds: float, samples: float, units: float) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.samples += samples
        self.units += units
        self.times.add(seconds)


@dataclass
class SpeedSums:
    """The speed of a run, step by step."""

    warm_up: _Sums = field(default_factory=_Sums)
    settled: _Sums = field(default_factory=_Sums)

    def add(self, step: Step) -> None:
        if step.seconds:
            sums = self.warm_up if step.warm_up else self.settled
            sums.add(step.seconds, step.samples or 0.0, step.units or 0.0)

    def speed(self) -> Speed | None:
        """Return the speed after the warm-up, or of the warm-up if there are no other steps."""
        counted = self.settled if self.settled.num_steps else self.warm_up
        if not counted.num_steps:
            return None
        return Speed(
            samples=counted.samples / counted.seconds,
            units=(counted.units or counted.samples) / counted.seconds,
            median_step_s=counted.times.median(),
            mean_step_s=counted.seconds / counted.num_steps,
            num_steps=counted.num_steps,
            num_warm_up=self.warm_up.num_steps if counted is self.settled else 0,
        )
