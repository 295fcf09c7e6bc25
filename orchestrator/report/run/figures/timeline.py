"""Timeline of a run: its notable events in order, long series of the same kind shortened."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.report.draw.html import esc
from orchestrator.report.draw.text import event_text, event_tone
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.types import seconds_text

MAX_ROWS = 60
MAX_SERIES = 3
"""More events of one kind in a row are shortened to the first and the last."""

_SHOWN = (
    *(kinds.Compile, kinds.CudaGraph, kinds.Placement, kinds.ExpertChange, kinds.SnapshotInterval),
    *(kinds.Warned, kinds.OutOfMemory, kinds.Resume, kinds.Settings, kinds.Checkpoint, kinds.Failure),
    *(kinds.Recovery, kinds.End),
)


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
    events = [_timeline_row(event, record) for event in record.events if isinstance(event, _SHOWN)]
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
    begin = record.events[0].time
    return TimelineRow(
        after_s=max(0.0, event.time - begin) if begin is not None and event.time is not None else None,
        step=event.step,
        kind=_NAMES.get(event.EVENT, event.EVENT),
        tone=event_tone(event),
        text=event_text(event),
    )


_NAMES = {
    "oom": "out of memory",
    "compile": "compilation",
    "cuda_graph": "CUDA graph",
    "snapshot_interval": "snapshots",
    "expert": "experts",
    "settings": "changed settings",
}
