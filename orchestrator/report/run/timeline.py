"""What happened on the way: the events a person would tell of, in order, with runs of the same kind told in short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from orchestrator.record.events import Event
from orchestrator.record.text import failure_text, recovery_text
from orchestrator.report.run.read import RunRecord, entries, finite
from orchestrator.report.run.svg import esc
from orchestrator.types import bytes_text, seconds_text

MAX_ROWS = 60


@dataclass(frozen=True)
class Happening:
    """One row: seconds since the record began, the step where known, what kind of thing, and a sentence."""

    after_s: float | None
    step: int | None
    kind: str
    tone: str
    text: str


def happenings(record: RunRecord) -> list[Happening]:
    """The events of note. Of many alike in a row the first and the last are told; of too many, the last."""
    told = [_happening(event, record) for event in record.events if event["event"] in _TELL]
    rows: list[Happening] = []
    for _, alike in groupby(told, key=lambda row: row.kind):
        rows += _in_short(list(alike))
    return rows[-MAX_ROWS:]


def timeline_list(record: RunRecord) -> str:
    """The happenings as a list of HTML; empty when there are none."""
    rows = "".join(
        f'<li class="t-{row.tone}"><span>{f"+{seconds_text(row.after_s)}" if row.after_s is not None else ""}</span>'
        f"<span>{f'step {row.step}' if row.step is not None else ''}</span><em>{esc(row.kind)}</em><p>{esc(row.text)}</p></li>"
        for row in happenings(record)
    )
    return f'<ol class="card times">{rows}</ol>' if rows else ""


def _in_short(alike: list[Happening]) -> list[Happening]:
    if len(alike) <= 3:
        return alike
    first, last = alike[0], alike[-1]
    return [first, Happening(None, None, first.kind, first.tone, f"… {len(alike) - 2} more"), last]


def _happening(event: Event, record: RunRecord) -> Happening:
    tone, tell = _TELL[event["event"]]
    if event["event"] == "end" and event.get("status") == "failed":
        tone = "bad"
    if event["event"] == "failure" and event.get("final") is False:
        tone = "warn"
    begin, now = finite(record.events[0].get("time")), finite(event.get("time"))
    step = event.get("step")
    return Happening(
        after_s=max(0.0, now - begin) if begin is not None and now is not None else None,
        step=step if isinstance(step, int) else None,
        kind=_NAMES.get(event["event"], event["event"]),
        tone=tone,
        text=tell(event),
    )


def _warning(event: Event) -> str:
    return ": ".join(str(event[name]) for name in ("kind", "message") if event.get(name))


def _oom(event: Event) -> str:
    where = f" in {event['where']}" if event.get("where") else ""
    return f"micro-batch of {event.get('micro_batch', '?')} did not fit{where}; went on with {event.get('next_micro_batch', '?')}"


def _resume(event: Event) -> str:
    skipped = entries(event, "skipped")
    passed = "; ".join(f"passed over {item.get('path')}: {item.get('reason')}" for item in skipped)
    source = "copies in memory" if event.get("source") == "memory" else event.get("path") or "a checkpoint"
    return f"went on from {source}" + (f"; {passed}" if passed else "")


def _checkpoint(event: Event) -> str:
    size, took = finite(event.get("bytes")), finite(event.get("seconds"))
    measures = [bytes_text(size)] if size is not None else []
    measures += [seconds_text(took)] if took is not None else []
    if (stall := finite(event.get("stall"))) is not None and took is not None and stall < took:
        measures.append(f"{seconds_text(stall)} of it held up the training")
    return str(event.get("path", "written")) + (f" ({', '.join(measures)})" if measures else "")


def _failure(event: Event) -> str:
    return _warning(event) if event.get("rank") is None else failure_text(event)


def _recovery(event: Event) -> str:
    """What it came to, its parts, and why it was decided so."""
    parts = [
        (name, finite(event.get(f"{name}_seconds"))) for name in ("detect", "regroup", "restore", "replay")
    ]
    took = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts if seconds is not None)
    reason = f"; {event['reason']}" if event.get("reason") else ""
    return recovery_text(event) + (f" ({took})" if took else "") + reason


def _compile(event: Event) -> str:
    took = finite(event.get("seconds"))
    parts = [
        str(event.get("status", "")),
        f"in {seconds_text(took)}" if took else "",
        f"({event['detail']})" if event.get("detail") else "",
    ]
    return " ".join(part for part in parts if part)


def _placement(event: Event) -> str:
    return str(event.get("sentence") or event.get("method") or "")


def _end(event: Event) -> str:
    return str(event.get("status", "")) + (f": {event['reason']}" if event.get("reason") else "")


_NAMES = {"oom": "out of memory", "compile": "compilation"}
_TELL: dict[str, tuple[str, Callable[[Event], str]]] = {
    "compile": ("calm", _compile),
    "placement": ("calm", _placement),
    "warning": ("warn", _warning),
    "oom": ("bad", _oom),
    "resume": ("info", _resume),
    "checkpoint": ("calm", _checkpoint),
    "failure": ("bad", _failure),
    "recovery": ("info", _recovery),
    "end": ("good", _end),
}
