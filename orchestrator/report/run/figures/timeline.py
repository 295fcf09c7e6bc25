"""Timeline of a run: its notable events in order, long series of the same kind shortened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.report.draw.markup import esc
from orchestrator.report.draw.text import (
    change_line,
    cuda_graph_text,
    failure_text,
    recovery_text,
    settings_text,
)
from orchestrator.report.run.figures.read import RunRecord
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
    events = [_timeline_row(event, record) for event in record.events if type(event) in _TEXTS]
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
    tone, text = _TEXTS[type(event)]
    if isinstance(event, kinds.End) and event.status == "failed":
        tone = "bad"
    if isinstance(event, kinds.Failure) and event.final is False:
        tone = "warn"
    begin = record.events[0].time
    return TimelineRow(
        after_s=max(0.0, event.time - begin) if begin is not None and event.time is not None else None,
        step=event.step,
        kind=_NAMES.get(event.EVENT, event.EVENT),
        tone=tone,
        text=text(event),
    )


def _warning_text(event: kinds.Warned | kinds.Failure) -> str:
    return ": ".join(text for text in (event.kind, event.message) if text)


def _oom_text(event: kinds.OutOfMemory) -> str:
    where = f" in {event.where}" if event.where else ""
    sizes = ["?" if size is None else size for size in (event.micro_batch, event.next_micro_batch)]
    return f"micro-batch of {sizes[0]} did not fit{where}; continued with {sizes[1]}"


def _resume_text(event: kinds.Resume) -> str:
    source = "snapshots in memory" if event.source == "memory" else event.path or "a checkpoint"
    skipped = [f"skipped {each.path}: {each.reason}" for each in event.skipped]
    return "; ".join([f"continued from {source}", *skipped])


def _checkpoint_text(event: kinds.Checkpoint) -> str:
    details = []
    if event.bytes is not None:
        details.append(bytes_text(event.bytes))
    if event.seconds is not None:
        details.append(seconds_text(event.seconds))
    if event.stall is not None and event.seconds is not None and event.stall < event.seconds:
        details.append(f"training blocked for {seconds_text(event.stall)} of it")
    return (event.path or "written") + (f" ({', '.join(details)})" if details else "")


def _failure_text(event: kinds.Failure) -> str:
    return _warning_text(event) if event.rank is None else failure_text(event)


def _recovery_text(event: kinds.Recovery) -> str:
    """Return the outcome of a recovery, its parts, and the reason of the decision."""
    names = ("detect", "regroup", "restore", "replay")
    seconds = {name: getattr(event, f"{name}_seconds") for name in names}
    parts = [f"{name} {seconds_text(value)}" for name, value in seconds.items() if value is not None]
    reason = f"; {event.reason}" if event.reason else ""
    return recovery_text(event) + (f" ({', '.join(parts)})" if parts else "") + reason


def _compile_text(event: kinds.Compile) -> str:
    parts = [
        event.status,
        f"in {seconds_text(event.seconds)}" if event.seconds else "",
        f"({event.detail})" if event.detail else "",
    ]
    return " ".join(part for part in parts if part)


def _placement_text(event: kinds.Placement) -> str:
    return event.sentence or event.method


def _snapshot_interval_text(event: kinds.SnapshotInterval) -> str:
    return f"every {'?' if event.every is None else event.every} steps: {event.reason}"


def _end_text(event: kinds.End) -> str:
    return event.status + (f": {event.reason}" if event.reason else "")


_NAMES = {
    "oom": "out of memory",
    "compile": "compilation",
    "cuda_graph": "CUDA graph",
    "snapshot_interval": "snapshots",
    "expert": "experts",
    "settings": "changed settings",
}
_TEXTS: dict[type[Event], tuple[str, Callable[..., str]]] = {
    kinds.Compile: ("calm", _compile_text),
    kinds.CudaGraph: ("calm", cuda_graph_text),
    kinds.Placement: ("calm", _placement_text),
    kinds.ExpertChange: ("info", change_line),
    kinds.SnapshotInterval: ("calm", _snapshot_interval_text),
    kinds.Warned: ("warn", _warning_text),
    kinds.OutOfMemory: ("bad", _oom_text),
    kinds.Resume: ("info", _resume_text),
    kinds.Settings: ("warn", settings_text),
    kinds.Checkpoint: ("calm", _checkpoint_text),
    kinds.Failure: ("bad", _failure_text),
    kinds.Recovery: ("info", _recovery_text),
    kinds.End: ("good", _end_text),
}
"""Tone and text of each kind of event."""
