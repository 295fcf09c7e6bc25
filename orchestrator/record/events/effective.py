"""The events of a record that count: a restart or recovery at step N discards what was recorded past N."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.record.events.kinds import Event, Failure, Recovery, Start, Step, StepEvent

MARKERS = (Start, Failure, Recovery)
"""Events that say where workers begin, end, or continue."""


@dataclass
class Rollbacks:
    """Finds the events after which training continues from an earlier step. Give it all events in order."""

    num_starts: int = 0
    last_marker: str = ""
    last_step: int | None = None

    def add(self, event: Event) -> int | None:
        """Return the step that training continues from after this event; None if nothing is discarded."""
        if isinstance(event, Step):
            return self._step(event.step)
        if not isinstance(event, MARKERS):
            return None
        # The first steps of new processes may precede the ``recovery`` event, which must not discard
        # them.
        is_start = isinstance(event, Start)
        has_restarted = self.last_marker == "start" and self.num_starts > 1
        is_rollback = is_start or (isinstance(event, Recovery) and not has_restarted)
        self.num_starts += is_start
        self.last_marker = event.EVENT
        # A damaged line discards nothing: repeated steps do, when they come.
        if not is_rollback or event.step is None:
            return None
        if self.last_step is not None:
            self.last_step = min(self.last_step, event.step)
        return event.step

    def _step(self, step: int) -> int | None:
        # A step that comes again without a restart before it: the line of the restart is damaged.
        is_repeated = self.last_step is not None and step <= self.last_step
        self.last_step = step
        return step - 1 if is_repeated else None


def limits_of(events: Iterable[Event]) -> list[float]:
    """Return for each event the lowest step that training continues from after it."""
    rollbacks = Rollbacks()
    steps = [rollbacks.add(event) for event in events]
    limits: list[float] = []
    limit = math.inf
    for step in reversed(steps):
        limits.append(limit)
        limit = limit if step is None else min(limit, step)
    return limits[::-1]


def effective_events(events: Iterable[Event]) -> list[Event]:
    """Return the events that count, in order."""
    recorded = list(events)
    return [
        event
        for event, limit in zip(recorded, limits_of(recorded), strict=True)
        if not isinstance(event, StepEvent) or event.step <= limit
    ]
