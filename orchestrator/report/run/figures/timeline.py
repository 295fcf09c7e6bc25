"""Timeline of a run: its notable events in order, long series of the same kind shortened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from orchestrator.record.experts.expert_changes import parse_change
from orchestrator.record.files.events import Event
from orchestrator.report.draw.markup import esc
from orchestrator.report.draw.text import (
    change_line,
    cuda_graph_text,
    failure_text,
    recovery_text,
    settings_text,
)
from orchestrator.report.run.figures.read import RunRecord, entries, finite
from orchestrator.types import bytes_text, seconds_text

MAX_ROWS = 60
MAX_SERIES = 3
"""More events of one kind in a row are shortened to the first and the last."""


@dataclass(frozen=True)
class TimelineRow:
    """An event: seconds since the record began, the step if known, its kind, and a sentence."""

    after_s: float | None
    step: int | None
    kind: str
    tone: str
    text: str


def timeline_rows(record: RunRecord) -> list[TimelineRow]:
    """Return the notable events; of a long series of one kind the first and the last, of too many
    the last."""
    events = [_timeline_row(event, record) for event in record.events if event["event"] in _TEXTS]
    rows: list[TimelineRow] = []
    for _, series in groupby(events, key=lambda row: row.kind):
        rows += _shortened(list(series))
    return rows[-MAX_ROWS:]


def timeline_list(record: RunRecord) -> str:
    """Return the timeline as an HTML list; empty without events."""
    rows = "".join(map(_list_item, timeline_rows(record)))
    return f'<ol class="card times">{rows}</ol>' if rows else ""


def _list_item(row: TimelineRow) -> str:
    time = f"+{seconds_text(row.after_s)}" if row.after_s is not None else ""
    step = f"step {row.step}" if row.step is not None else ""
    return (
        f'<li class="t-{row.tone}"><span>{time}</span><span>{step}</span>'
        f"<em>{esc(row.kind)}</em><p>{esc(row.text)}</p></li>"
    )


def _shortened(series: list[TimelineRow]) -> list[TimelineRow]:
    if len(series) <= MAX_SERIES:
        return series
    first = series[0]
    return [first, TimelineRow(None, None, first.kind, first.tone, f"… {len(series) - 2} more"), series[-1]]


def _timeline_row(event: Event, record: RunRecord) -> TimelineRow:
    tone, text = _TEXTS[event["event"]]
    if event["event"] == "end" and event.get("status") == "failed":
        tone = "bad"
    if event["event"] == "failure" and event.get("final") is False:
        tone = "warn"
    begin = finite(record.events[0].get("time"))
    time = finite(event.get("time"))
    step = event.get("step")
    return TimelineRow(
        after_s=max(0.0, time - begin) if begin is not None and time is not None else None,
        step=step if isinstance(step, int) else None,
        kind=_NAMES.get(event["event"], event["event"]),
        tone=tone,
        text=text(event),
    )


def _warning_text(event: Event) -> str:
    return ": ".join(str(event[name]) for name in ("kind", "message") if event.get(name))


def _oom_text(event: Event) -> str:
    where = f" in {event['where']}" if event.get("where") else ""
    smaller = event.get("next_micro_batch", "?")
    return f"micro-batch of {event.get('micro_batch', '?')} did not fit{where}; continued with {smaller}"


def _resume_text(event: Event) -> str:
    source = event.get("path") or "a checkpoint"
    if event.get("source") == "memory":
        source = "snapshots in memory"
    skipped = [f"skipped {item.get('path')}: {item.get('reason')}" for item in entries(event, "skipped")]
    return "; ".join([f"continued from {source}", *skipped])


def _checkpoint_text(event: Event) -> str:
    details = []
    size = finite(event.get("bytes"))
    if size is not None:
        details.append(bytes_text(size))
    seconds = finite(event.get("seconds"))
    if seconds is not None:
        details.append(seconds_text(seconds))
    stall = finite(event.get("stall"))
    if stall is not None and seconds is not None and stall < seconds:
        details.append(f"training blocked for {seconds_text(stall)} of it")
    return str(event.get("path", "written")) + (f" ({', '.join(details)})" if details else "")


def _failure_text(event: Event) -> str:
    return _warning_text(event) if event.get("rank") is None else failure_text(event)


def _recovery_text(event: Event) -> str:
    """Return the outcome of a recovery, its parts, and the reason of the decision."""
    names = ("detect", "regroup", "restore", "replay")
    seconds = {name: finite(event.get(f"{name}_seconds")) for name in names}
    parts = [f"{name} {seconds_text(value)}" for name, value in seconds.items() if value is not None]
    reason = f"; {event['reason']}" if event.get("reason") else ""
    return recovery_text(event) + (f" ({', '.join(parts)})" if parts else "") + reason


def _compile_text(event: Event) -> str:
    seconds = finite(event.get("seconds"))
    parts = [
        str(event.get("status", "")),
        f"in {seconds_text(seconds)}" if seconds else "",
        f"({event['detail']})" if event.get("detail") else "",
    ]
    return " ".join(part for part in parts if part)


def _placement_text(event: Event) -> str:
    return str(event.get("sentence") or event.get("method") or "")


def _expert_text(event: Event) -> str:
    change = parse_change(event)
    return change_line(change) if change is not None else str(event.get("reason") or "")


def _snapshot_interval_text(event: Event) -> str:
    return f"every {event.get('every', '?')} steps: {event.get('reason', '')}"


def _end_text(event: Event) -> str:
    return str(event.get("status", "")) + (f": {event['reason']}" if event.get("reason") else "")


_NAMES = {
    "oom": "out of memory",
    "compile": "compilation",
    "cuda_graph": "CUDA graph",
    "snapshot_interval": "snapshots",
    "expert": "experts",
    "settings": "changed settings",
}
_TEXTS: dict[str, tuple[str, Callable[[Event], str]]] = {
    "compile": ("calm", _compile_text),
    "cuda_graph": ("calm", cuda_graph_text),
    "placement": ("calm", _placement_text),
    "expert": ("info", _expert_text),
    "snapshot_interval": ("calm", _snapshot_interval_text),
    "warning": ("warn", _warning_text),
    "oom": ("bad", _oom_text),
    "resume": ("info", _resume_text),
    "settings": ("warn", settings_text),
    "checkpoint": ("calm", _checkpoint_text),
    "failure": ("bad", _failure_text),
    "recovery": ("info", _recovery_text),
    "end": ("good", _end_text),
}
"""Tone and text of each kind of event."""
