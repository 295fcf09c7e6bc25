"""What went wrong and how it went on, in one line: the screen and the report say it alike."""

from __future__ import annotations

import math

from orchestrator.record.events import Event
from orchestrator.record.scalars import to_float

_SOURCES = {"memory": ", from copies in memory", "disk": ", from a checkpoint"}
LONGEST = 160  # characters of a cause; the whole of it is in events.jsonl


def failure_text(event: Event) -> str:
    """'step 40: host 1 was lost'."""
    first = next(iter(str(event.get("message") or "").splitlines()), "")[:LONGEST]
    at = "" if event.get("step") is None else f"step {event['step']}: "
    return at + (first or str(event.get("kind") or "failure"))


def recovery_text(event: Event) -> str:
    """'recovered in 12.3 s on 2 workers at step 35, from copies in memory, 5 steps repeated'."""
    took, lost = to_float(event.get("total_seconds")), _count(event.get("lost_steps"))
    parts = ["recovered", "" if took is None else f"in {took:.1f} s", _workers(event)]
    parts.append("" if event.get("step") is None else f"at step {event['step']}")
    repeated = f", {lost} {'step' if lost == 1 else 'steps'} repeated" if lost else ""
    return " ".join(part for part in parts if part) + _SOURCES.get(str(event.get("source")), "") + repeated


def _count(value: object) -> int:
    found = to_float(value)
    return int(found) if found is not None and math.isfinite(found) else 0


def _workers(event: Event) -> str:
    now, before = event.get("workers"), event.get("workers_before")
    if now is None:
        return ""
    fewer = f" instead of {before}" if before not in (None, now) else ""
    return f"on {now} {'worker' if now == 1 else 'workers'}{fewer}"
