"""The steps between two snapshots, chosen by the measured cost of taking and moving one. Pure.

The driver chooses for all hosts and sends the interval with each segment, because all hosts must take
their snapshots after the same steps. Results do not depend on it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from orchestrator.types import Choice, seconds_text

_BUDGET = 0.02
"""The part of the time that snapshots may take from the steps."""
_MIN_SECONDS = 1.0
"""A recovery takes longer than this: snapshots at shorter intervals would hardly shorten it."""
_MAX_SECONDS = 300.0
"""The most work that a failure may cost, even if snapshots then exceed their budget."""
_FIRST_STEPS = 5
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
            Choice(_FIRST_STEPS, "no snapshot has been measured yet")
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
