"""The lengths of the segments in which hosts train, and the steps between two of their snapshots.

The driver chooses both by what it measures, and sends the interval with each segment: all hosts must take
their snapshots after the same steps. Results do not depend on it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from orchestrator.types import Choice, seconds_text

_SEGMENT_SECONDS = 5.0
_FIRST_STEPS = 2
"""The length of a segment before the duration of a step is known."""
_MAX_GROWTH = 4
MAX_GRANTED = 3
"""Segments that the hosts may have at once: the one that they run, and two more.

So the hosts go on for ten seconds while the driver is slow or away. When the driver wants to change
the group, it waits for the segments that it has granted."""


class SegmentLengths:
    """Chooses the number of steps of each segment, so that a segment takes about five seconds.

    The hosts report how long a segment took: the driver may learn late that it has ended."""

    def __init__(self) -> None:
        self._steps = _FIRST_STEPS
        self._granted = deque[int]()
        """The lengths of the segments that the hosts have not finished."""
        self.begun = False
        """Whether the group has begun its first segment."""

    def begin_group(self) -> None:
        """Begin a new group, which has no segment yet."""
        self.begun = False
        self._granted.clear()

    def grant(self, steps_to_replay: int) -> int:
        """Return the length of the next segment, which is granted now.

        After a failure, the first segment has a single step, which ends the recovery time. The
        second one has the other lost steps (``steps_to_replay``), after which the recovery is
        recorded."""
        steps = self._steps
        if steps_to_replay:
            steps = steps_to_replay if self.begun else 1
        self.begun = True
        self._granted.append(steps)
        return steps

    def finish(self, seconds: float) -> None:
        """The hosts have finished the oldest of the granted segments."""
        steps = self._granted.popleft()
        # A few steps may be much faster or slower than the ones that follow.
        most = _MAX_GROWTH * max(steps, _FIRST_STEPS)
        self._steps = max(1, min(most, round(steps * _SEGMENT_SECONDS / max(1e-3, seconds))))


_BUDGET = 0.02
"""The part of the time that snapshots may take from the steps."""
_MIN_SECONDS = 1.0
"""A recovery takes longer than this: snapshots at shorter intervals would hardly shorten it."""
_MAX_SECONDS = 300.0
"""The most work that a failure may cost, even if snapshots then exceed their budget."""
_FIRST_INTERVAL = 5
"""Steps between snapshots until the first one is measured."""
_WINDOW = 5
"""Measurements whose median counts: a single slow one changes nothing."""
_MIN_CHANGE = 1.25
"""The factor by which an interval must change to replace the current one."""


@dataclass(frozen=True)
class SnapshotCost:
    """The measured cost of one set of snapshots."""

    stall_s: float
    """How long the slowest host was kept from its steps."""
    transfer_s: float
    """The time from taking it until the driver has it and its backups are stored."""


def choose_interval(cost: SnapshotCost, step_s: float) -> Choice[int]:
    """Return the steps between two snapshots, with the reason.

    Their cost stays within the budget, unless a failure would then cost too much work. No snapshot
    is due before the last one has moved."""
    stall = f"a snapshot stalls the steps for {seconds_text(cost.stall_s)}"
    interval_s = cost.stall_s / _BUDGET
    reason = f"{stall}: {_BUDGET:.0%} of the time"
    if interval_s > _MAX_SECONDS:
        interval_s = _MAX_SECONDS
        share = cost.stall_s / (cost.stall_s + interval_s)
        reason = f"{stall}: {share:.1%} of the time, so that no more than {seconds_text(interval_s)} are lost"
    if interval_s < _MIN_SECONDS:
        interval_s = _MIN_SECONDS
        reason = f"{stall}; more often than every {seconds_text(interval_s)} would shorten no recovery"
    if interval_s < cost.transfer_s:
        interval_s = cost.transfer_s
        reason = f"a snapshot takes {seconds_text(interval_s)} to reach the driver and its backups"
    steps = max(1, math.ceil(interval_s / step_s))
    return Choice(steps, f"{reason} (steps of {seconds_text(step_s)})")


class SnapshotInterval:
    """The interval of a run: as set, or measured again after each segment."""

    def __init__(self, requested: int | Literal["auto"]) -> None:
        self._is_automatic = requested == "auto"
        self._costs: deque[SnapshotCost] = deque(maxlen=_WINDOW)
        self._step_seconds: deque[float] = deque(maxlen=_WINDOW)
        self._last_step: int | None = None
        self.current = (
            Choice(_FIRST_INTERVAL, "no snapshot has been measured yet")
            if requested == "auto"
            else Choice(requested, f"set by --snapshot-every {requested}")
        )

    def begin_group(self) -> None:
        """Begin a new group. Its first step may compile, so that its first segment is not measured."""
        self._last_step = None

    def segment_done(self, step: int, seconds: float, costs: Iterable[SnapshotCost]) -> Choice[int] | None:
        """Take in a segment that has ended at ``step``, and the snapshots that have moved since the last.

        Return the new interval if it has changed."""
        self._costs.extend(costs)
        if self._last_step is not None and step > self._last_step:
            self._step_seconds.append(seconds / (step - self._last_step))
        self._last_step = step
        if not self._is_automatic or not self._costs or not self._step_seconds:
            return None
        cost = SnapshotCost(
            statistics.median(cost.stall_s for cost in self._costs),
            statistics.median(cost.transfer_s for cost in self._costs),
        )
        # A clock that stands still must not divide by zero.
        choice = choose_interval(cost, max(1e-6, statistics.median(self._step_seconds)))
        smaller, larger = sorted((choice.value, self.current.value))
        if larger < _MIN_CHANGE * smaller:
            return None
        self.current = choice
        return choice
