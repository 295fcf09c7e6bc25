"""The speed of a run: one definition for the summary, the report and the tables.

The first steps of a process compile, allocate and fill caches. Their events carry ``warm_up``, and
every rate and mean leaves them out, unless a run has no others.

A rate counts what was computed. A task with several units per sample, as the tokens of a language
model, computes that number for each sample, padding and tokens without a loss included; other tasks
count what their loss is a mean over. Plans and trials of a sweep count the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.record.files.events import Event
from orchestrator.record.files.scalars import to_float

RECENT_STEPS = 50
"""The speed of a run that goes on is that of its last steps."""


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


def after_warm_up(events: Sequence[Event]) -> list[Event]:
    """Return the events of steps, phases or exchanges after the warm-up; all if there are no others."""
    return [event for event in events if event.get("warm_up") is not True] or list(events)


def speed_of(steps: Sequence[Event]) -> Speed | None:
    """Return the speed by the events of a run's steps; None if none has a time."""
    timed = [step for step in steps if _number(step, "seconds") > 0]
    counted = after_warm_up(timed)
    if not counted:
        return None
    seconds = [_number(step, "seconds") for step in counted]
    samples = sum(_number(step, "samples") for step in counted)
    units = sum(_number(step, "units") for step in counted) or samples
    total_s = sum(seconds)
    return Speed(
        samples=samples / total_s,
        units=units / total_s,
        median_step_s=median(seconds),
        mean_step_s=total_s / len(counted),
        num_steps=len(counted),
        num_warm_up=len(timed) - len(counted),
    )


def _number(event: Event, name: str) -> float:
    return to_float(event.get(name)) or 0.0
