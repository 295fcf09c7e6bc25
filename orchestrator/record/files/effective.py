"""The events of a record that count: a restart or recovery at step N discards what was recorded past N."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.record.files.events import Event

MARKERS = frozenset({"start", "failure", "recovery"})
"""Events that say where workers begin, end, or continue."""
STEP_KINDS = frozenset(
    {
        "step",
        "bad_samples",
        "evaluate",
        "epoch",
        "phases",
        "exchange",
        "load",
        "expert",
        "expert_graph",
        "monitor",
        "log",
    }
)
"""Events that describe one step or the steps before it."""


@dataclass
class Rollbacks:
    """Finds the events after which training continues from an earlier step. Give it all events in order."""

    num_starts: int = 0
    last_marker: str = ""
    last_step: int | None = None

    def add(self, event: Event) -> int | None:
        """Return the step that training continues from after this event; None if nothing is discarded."""
        kind = event["event"]
        if kind == "step":
            return self._step(event["step"])
        if kind not in MARKERS:
            return None
        # The first steps of new processes may precede the ``recovery`` event, which must not discard
        # them.
        has_restarted = self.last_marker == "start" and self.num_starts > 1
        is_rollback = kind == "start" or (kind == "recovery" and not has_restarted)
        self.num_starts += kind == "start"
        self.last_marker = kind
        if not is_rollback:
            return None
        step = event.get("step")
        # A record of unknown origin may hold anything.
        step = step if isinstance(step, int) else 0
        if self.last_step is not None:
            self.last_step = min(self.last_step, step)
        return step

    def _step(self, step: int) -> int | None:
        # A step that comes again without a restart before it: the line of the restart is damaged.
        is_repeated = self.last_step is not None and step <= self.last_step
        self.last_step = step
        return step - 1 if is_repeated else None


def effective_events(events: Iterable[Event]) -> list[Event]:
    """Return the events that count, in order."""
    recorded = list(events)
    rollbacks = Rollbacks()
    continued = (rollbacks.add(event) for event in recorded)
    steps = {index: step for index, step in enumerate(continued) if step is not None}
    effective: list[Event] = []
    # Backwards: the limit of an event is the lowest step of all rollbacks after it.
    limit = math.inf
    for index in range(len(recorded) - 1, -1, -1):
        event = recorded[index]
        if event["event"] not in STEP_KINDS or event["step"] <= limit:
            effective.append(event)
        limit = min(limit, steps.get(index, math.inf))
    return effective[::-1]
