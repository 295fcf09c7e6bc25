"""Failures and recoveries in one line each, in the same words on the screen and in the report."""

from __future__ import annotations

import math

from orchestrator.record.events import Event
from orchestrator.record.scalars import to_float
from orchestrator.types import first_line

MAX_CAUSE_CHARS = 160  # events.jsonl has the whole message
_SOURCES = {"memory": ", from snapshots in memory", "disk": ", from a checkpoint"}


def failure_text(event: Event) -> str:
    """Return a failure as text: 'step 40: host 1 was lost'."""
    cause = str(event.get("message") or "").strip() or str(event.get("kind") or "failure")
    step = event.get("step")
    prefix = "" if step is None else f"step {step}: "
    return prefix + first_line(cause, MAX_CAUSE_CHARS)


def recovery_text(event: Event) -> str:
    """Return a recovery as text.

    Example: 'recovered in 12.3 s on 2 workers at step 35, from snapshots in memory, 5 steps
    repeated'.
    """
    seconds = to_float(event.get("total_seconds"))
    parts = [
        "recovered",
        "" if seconds is None else f"in {seconds:.1f} s",
        _workers_text(event),
        "" if event.get("step") is None else f"at step {event['step']}",
    ]
    lost = _count(event.get("lost_steps"))
    repeated = f", {lost} {'step' if lost == 1 else 'steps'} repeated" if lost else ""
    source = _SOURCES.get(str(event.get("source")), "")
    return " ".join(part for part in parts if part) + source + repeated


def _count(value: object) -> int:
    number = to_float(value)
    return int(number) if number is not None and math.isfinite(number) else 0


def _workers_text(event: Event) -> str:
    workers = event.get("workers")
    if workers is None:
        return ""
    before = event.get("workers_before")
    fewer = f" instead of {before}" if before not in (None, workers) else ""
    return f"on {workers} {'worker' if workers == 1 else 'workers'}{fewer}"
