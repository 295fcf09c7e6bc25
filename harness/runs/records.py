"""Lines of event logs, and the events that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from orchestrator.record.events.kinds import JsonEvent, decode_event


def by_step(events: Iterable[JsonEvent], kind: str = "step") -> list[JsonEvent]:
    """Return the last line of each step, in order of steps."""
    last = {event["step"]: event for event in events if event["event"] == kind}
    return [last[step] for step in sorted(last)]


def made(line: JsonEvent) -> Any:
    """Return the event of a line."""
    event = decode_event(line)
    assert event is not None, f"{line} is no event"
    return event


def decoded(lines: Iterable[JsonEvent]) -> list[Any]:
    """Return the events of lines, without those that are damaged."""
    return [event for line in lines if (event := decode_event(line)) is not None]
