"""Events of a run in one line each, for the list of recent events."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePath

from orchestrator.record.experts.expert_changes import parse_change
from orchestrator.record.experts.placements import measurement
from orchestrator.record.files.events import Event
from orchestrator.record.files.scalars import to_float
from orchestrator.report.draw.text import (
    change_line,
    cuda_graph_text,
    failure_text,
    oom_text,
    recovery_text,
    settings_text,
)
from orchestrator.types import bytes_text, first_line, seconds_text

_BAD = "red"
_ATTENTION = "yellow"
_DIM = "dim"

Line = tuple[str, str]
"""Text and style."""


def event_line(event: Event) -> Line:
    """Return an event with the time of day, and the style that it is shown in."""
    text, style = _TEXTS[event["event"]](event)
    clock = measurement(event.get("time"))
    return f"{_clock_text(clock)}  {text}", style


def _clock_text(seconds: float | None) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds or 0.0))
    except (OverflowError, ValueError, OSError):  # a time that no clock shows
        return "??:??:??"


def _start(event: Event) -> Line:
    workers = event.get("workers") or 1
    where = f" on {workers} worker{'s' if workers != 1 else ''}"
    return f"started at step {event.get('step') or 0}{where}", _DIM


def _resume(event: Event) -> Line:
    if event.get("weights_only"):
        return f"started from the weights of {event.get('path')}", ""
    source = "memory" if event.get("source") == "memory" else event.get("path") or "no checkpoint"
    return f"resumed at step {event.get('step')} from {source}", _ATTENTION


def _expert(event: Event) -> Line:
    change = parse_change(event)
    if change is None:
        return "experts changed", _DIM
    return f"step {change.step}: {change_line(change)}", _ATTENTION if change.kind == "undone" else "cyan"


def _evaluate(event: Event) -> Line:
    numbers = {"validation loss": event.get("loss"), **event["metrics"]}
    known = {name: to_float(value) for name, value in numbers.items()}
    texts = [f"{name} {value:.4g}" for name, value in known.items() if value is not None]
    best = " ★ best" if event.get("best") is True else ""
    return f"step {event['step']}: {', '.join(texts)}{best}", ""


def _saved(verb: str) -> Callable[[Event], Line]:
    def line(event: Event) -> Line:
        name = PurePath(str(event.get("path") or "checkpoint")).name
        size = measurement(event.get("bytes"))
        seconds = measurement(event.get("seconds"))
        facts = [
            "" if size is None else f", {bytes_text(size)}",
            "" if seconds is None else f" in {seconds_text(seconds)}",
        ]
        return f"{verb} {name}{''.join(facts)}", _DIM

    return line


def _failure(event: Event) -> Line:
    return failure_text(event), _BAD


def _recovery(event: Event) -> Line:
    return recovery_text(event), "green"


def _compile(event: Event) -> Line:
    if event.get("status") == "failed":
        return f"compilation failed: {first_line(event.get('detail'))}", _ATTENTION
    return f"compiled in {seconds_text(measurement(event.get('seconds')) or 0.0)}", _DIM


def _end(event: Event) -> Line:
    style = {"completed": "green", "failed": _BAD}.get(str(event["status"]), _ATTENTION)
    return f"{event['status']}: {first_line(event['reason'])}", style


_TEXTS: dict[str, Callable[[Event], Line]] = {
    "start": _start,
    "resume": _resume,
    "settings": lambda event: (f"settings: {settings_text(event)}", _ATTENTION),
    "expert": _expert,
    "evaluate": _evaluate,
    "checkpoint": _saved("saved"),
    "upload": _saved("uploaded"),
    "oom": lambda event: (oom_text(event), _BAD),
    "compile": _compile,
    "cuda_graph": lambda event: (cuda_graph_text(event), _DIM),
    "warning": lambda event: (f"warning: {first_line(event.get('message'))}", _ATTENTION),
    "failure": _failure,
    "recovery": _recovery,
    "end": _end,
}
