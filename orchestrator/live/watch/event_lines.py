"""Events of a run in one line each, for the list of recent events."""

from __future__ import annotations

import time
from pathlib import PurePath

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.report.draw.text import (
    change_line,
    cuda_graph_text,
    failure_text,
    oom_text,
    recovery_text,
    score_texts,
    settings_text,
)
from orchestrator.types import bytes_text, counted, first_line, seconds_text

_BAD = "red"
_ATTENTION = "yellow"
_DIM = "dim"

Line = tuple[str, str]
"""Text and style."""


def event_line(event: Event) -> Line:
    """Return an event with the time of day, and the style that it is shown in."""
    text, style = _line(event)
    return f"{_clock_text(event.time)}  {text}", style


def _clock_text(seconds: float | None) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds or 0.0))
    except (OverflowError, ValueError, OSError):  # a time that no clock shows
        return "??:??:??"


def _line(event: Event) -> Line:
    match event:
        case kinds.Start():
            where = f" on {counted(event.workers or 1, 'worker')}"
            return f"started at step {event.step or 0}{where}", _DIM
        case kinds.Resume():
            return _resume(event)
        case kinds.Settings():
            return f"settings: {settings_text(event)}", _ATTENTION
        case kinds.ExpertChange():
            style = _ATTENTION if event.change == "undone" else "cyan"
            return f"step {event.step}: {change_line(event)}", style
        case kinds.Evaluation():
            best = " ★ best" if event.best else ""
            return f"step {event.step}: {', '.join(score_texts(event))}{best}", ""
        case kinds.Checkpoint() | kinds.Upload():
            return _saved(event), _DIM
        case kinds.OutOfMemory():
            return oom_text(event), _BAD
        case kinds.Compile() if event.status == "failed":
            return f"compilation failed: {first_line(event.detail)}", _ATTENTION
        case kinds.Compile():
            return f"compiled in {seconds_text(event.seconds or 0.0)}", _DIM
        case kinds.CudaGraph():
            return cuda_graph_text(event), _DIM
        case kinds.Warned():
            return f"warning: {first_line(event.message)}", _ATTENTION
        case kinds.Failure():
            return failure_text(event), _BAD
        case kinds.Recovery():
            return recovery_text(event), "green"
        case kinds.End():
            style = {"completed": "green", "failed": _BAD}.get(event.status, _ATTENTION)
            return f"{event.status}: {first_line(event.reason)}", style
        case _:
            raise ValueError(f"{event.EVENT} is no event that people read one by one")


def _resume(event: kinds.Resume) -> Line:
    if event.weights_only:
        return f"started from the weights of {event.path}", ""
    source = "memory" if event.source == "memory" else event.path or "no checkpoint"
    return f"resumed at step {event.step} from {source}", _ATTENTION


def _saved(event: kinds.Checkpoint | kinds.Upload) -> str:
    verb = "saved" if isinstance(event, kinds.Checkpoint) else "uploaded"
    size = "" if event.bytes is None else f", {bytes_text(event.bytes)}"
    duration = "" if event.seconds is None else f" in {seconds_text(event.seconds)}"
    return f"{verb} {PurePath(event.path or 'checkpoint').name}{size}{duration}"
