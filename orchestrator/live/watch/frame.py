"""One frame of the terminal view: the lines that show a run, for a width and a height."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.live.watch.expert_views import heat_map, hosts
from orchestrator.live.watch.figures import counts, head, losses, machine, progress, speed, step_phases
from orchestrator.live.watch.lines import Part, column_width, fitted, line, side_by_side
from orchestrator.record.events.kinds import Event, StepEvent
from orchestrator.record.live.state import RunState
from orchestrator.report.draw.text import event_text, event_tone
from orchestrator.types import first_line

if TYPE_CHECKING:
    from rich.text import Text

WIDE = 140
"""Columns from which experts are shown beside hosts and phases."""
MIN_EVENTS = 3
_EVENTS_HEAD = 2  # an empty line and the title
MAX_EVENTS = 12
MAX_ROWS = 16
"""Hosts or layers that are shown where the height is not limited."""
_STYLES = {"calm": "dim", "good": "green", "info": "cyan", "warn": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Size:
    """Columns and rows of the output; any number of rows if None."""

    width: int
    height: int | None = None

    @property
    def rows_of_experts(self) -> int:
        """Hosts or layers that are shown."""
        return MAX_ROWS if self.height is None else max(2, min(MAX_ROWS, self.height // 4))


def frame(state: RunState, name: str, size: Size, now: float, trouble: str = "") -> list[Text]:
    """Return the lines of a frame. ``trouble`` says why the record cannot be read now, if it cannot."""
    width = size.width
    lines = head(state, name, width, now)
    if trouble:
        lines.append(line((trouble, "bold yellow")))
    if state.last_time is None:
        return [*lines, line(("no events yet: the run has not started its first step", "dim"))]
    figures = [progress(state, width, now), losses(state, width), speed(state), counts(state)]
    lines += [line(""), *(each for each in figures if each is not None), *machine(state, width)]
    room = None if size.height is None else size.height - len(lines) - MIN_EVENTS - _EVENTS_HEAD
    lines += _parts(state, size, room)
    return [fitted(each, width) for each in lines + _events(state, size, len(lines))]


def _parts(state: RunState, size: Size, room: int | None) -> list[Text]:
    """Return phases, hosts and experts: one below the other, or in two columns.

    Where there is no room for all of them, hosts come before experts, and experts before phases."""
    is_wide = size.width >= WIDE
    column = column_width(size.width) if is_wide else size.width
    parts = {
        "phases": step_phases(state, column),
        "hosts": hosts(state, column, size.rows_of_experts),
        "experts": heat_map(state, column, size.rows_of_experts),
    }
    arrange = _in_columns if is_wide else _in_one_column
    lines = arrange(size.width, **parts)
    for name in ("phases", "experts", "hosts"):
        if room is not None and len(lines) > room:
            parts[name] = []
            lines = arrange(size.width, **parts)
    return lines


def _in_one_column(_width: int, **parts: list[Text]) -> list[Text]:
    return [each for part in parts.values() if part for each in (line(""), *part)]


def _in_columns(width: int, phases: list[Text], hosts: list[Text], experts: list[Text]) -> list[Text]:
    """Return the experts beside the others."""
    gap = [line("")] if phases and hosts else []
    left = [*phases, *gap, *hosts]
    if not left or not experts:
        return _in_one_column(width, only=left or experts)
    return [line(""), *side_by_side(left, experts, width)]


def _events(state: RunState, size: Size, num_lines: int) -> list[Text]:
    """Return the newest notable events, as many as there is room for."""
    room = MAX_EVENTS if size.height is None else size.height - num_lines - _EVENTS_HEAD
    shown = state.notable()[-max(MIN_EVENTS, min(MAX_EVENTS, room)) :]
    return [line(""), line(("events", "dim")), *(line("  ", _event_part(event)) for event in shown)]


def _event_part(event: Event) -> Part:
    """Return an event with the time of day, in the style of its tone."""
    step = f"step {event.step}: " if isinstance(event, StepEvent) else ""
    text = f"{_clock_text(event.time)}  {step}{first_line(event_text(event))}"
    return text, _STYLES.get(event_tone(event), "")


def _clock_text(seconds: float | None) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds or 0.0))
    except (OverflowError, ValueError, OSError):  # a time that no clock shows
        return "??:??:??"
