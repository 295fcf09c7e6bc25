"""The run's record: one JSON object a line, appended and flushed. Everything that looks at a run reads these lines.

| event      | fields besides ``event`` and ``time`` (unix seconds)                                                    |
|------------|---------------------------------------------------------------------------------------------------------|
| start      | version, task, strategy (single, data_parallel, expert_parallel), workers, device, precision,               |
|            | global_batch_size, parameters, total_steps, step; on several workers also backend, sharding, nodes and,     |
|            | where they differ, shares [part of the global batch by worker]; expert-parallel also gate (replicated,      |
|            | primary)                                                                                                  |
| placement  | step (done when it begins to hold), method (exact, lpt, round_robin, file), hosts [{rank, node, device,     |
|            | name, speed (FLOP/s, measured), memory (bytes or null)}], layers [{name, host_of [rank by expert], sizes    |
|            | [what a row costs, by expert], costs [predicted work by expert], seconds [predicted by host], bound,        |
|            | imbalance, gap}], sentence for people                                                                     |
| step       | step (from 1), epoch, loss, grad_norm, lr, samples, units, seconds, metrics {name: mean over the batch};  |
|            | warm_up true on the first steps of a process                                                              |
| phases     | step, steps, seconds per step of: data, forward, backward, optimizer and, on several workers,              |
|            | communication; total                                                                                      |
| exchange   | step, steps; per step: bytes (sent to other hosts, all hosts together), seconds (waited for it, mean over    |
|            | hosts), rows (that travelled, all hosts together)                                                         |
| load       | step, steps, loads [layer][expert]: tokens per expert summed over those steps                              |
| epoch      | epoch, step, seconds, samples, loss (mean), samples_per_second, memory {allocated, reserved}               |
| evaluate   | step, epoch, loss, metrics, samples, seconds, best                                                        |
| checkpoint | step, path, bytes, seconds (until it is safe on disk), stall (of those, the loop was held up)              |
| monitor    | step, host {cpu_percent, memory_used, memory_total, process_memory}, devices [{index, name, …}]            |
| oom        | step, micro_batch, next_micro_batch, where                                                                |
| compile    | status, seconds, detail                                                                                   |
| warning    | kind, message                                                                                             |
| notice     | message: something that takes a while                                                                     |
| resume     | step, path, skipped [{path, reason}]; source memory where it was no checkpoint                             |
| failure    | kind, message, rank (or null), step, final: only a final one ends the run                                  |
| recovery   | attempt, reason, workers_before, workers, step (taken up from), lost_steps, source (memory, disk),         |
|            | detect_seconds, regroup_seconds, restore_seconds, replay_seconds (to do again what was lost; expert         |
|            | parallel), total_seconds: from the failure until the first step after it is done                            |
| end        | status, reason, steps, seconds, memory {allocated, reserved}: the most of the run                          |

A step replayed after a restart is appended again: readers take its last line (``by_step``). A torn final line, left by
a killed writer, is dropped by readers and cut off before the next append. A run that restarts its workers after a failure
writes ``failure``, ``recovery`` and, where the workers are new processes, another ``start``: before or after ``recovery``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.redaction import Secrets, mask, mask_tree

Event = dict[str, Any]
Listener = Callable[[Event], None]


class EventLog:
    """Appends events to a file and hands each to its listeners (progress bar, trackers), in order; ``secrets`` in them are masked
    for both."""

    def __init__(self, path: Path, listeners: Iterable[Listener] = (), secrets: Secrets = ()) -> None:
        truncate_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._listeners = tuple(listeners)
        self._secrets = secrets

    def write(self, event: str, **fields: Any) -> None:
        self.write_all([{"event": event, "time": time.time(), **fields}])

    def write_all(self, events: Iterable[Event]) -> None:
        """Several events in one write: a kill in between leaves whole lines and at most one torn one."""
        written = [self._masked(event) for event in events]
        self._file.write("".join(line + "\n" for line, _ in written))
        self._file.flush()
        for listener in self._listeners:
            for _, event in written:
                listener(event)

    def _masked(self, event: Event) -> tuple[str, Event]:
        """The line of an event, and the event as it may be shown. Few hold a secret: only those are gone through."""
        line = encode_event(event)
        if mask(line, self._secrets) == line:
            return line, event
        # names of events and of fields are ours, and read again: a secret that is a word may be part of one. Those of metrics are not
        clean = {name: mask_tree(value, self._secrets, keys=name == "metrics") for name, value in event.items()}
        clean["event"] = event["event"]
        return encode_event(clean), clean

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def encode_event(event: Mapping[str, Any]) -> str:
    """One line of JSON. A number that JSON cannot carry (nan, inf) becomes its name as text, so the line stays standard."""
    try:
        return json.dumps(event, allow_nan=False)
    except ValueError:
        return json.dumps(_plain(event), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read_events(path: Path) -> list[Event]:
    """All whole lines of the file, in order; none where there is no file. Lines that are not JSON objects are skipped."""
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        return [event for line in lines if (event := parse_event(line)) is not None]


def last_events(path: Path) -> list[Event]:
    """The newest lines of a file that may be long: of the last megabyte."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - _TAIL)
        file.seek(begin)
        lines = file.read().split(b"\n")[1 if begin else 0 :]
    return [event for line in lines if line and (event := parse_event(line)) is not None]


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None where it holds something else, such as the torn line of a killed writer."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if ours and (line.count(b"[") + line.count(b"{") <= _DEEPEST or is_shallow(event)) else None


_DEEPEST = 32
_TAIL = 2**20


def is_shallow(value: Any, deepest: int = _DEEPEST) -> bool:
    """Whether a tree of plain values is one that those who show it can go through. What is written has a handful of levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return deepest > 0 and all(is_shallow(part, deepest - 1) for part in inner if isinstance(part, dict | list))


def effective_events(events: Iterable[Event]) -> list[Event]:
    """The events of the run as it went: what was recorded past the step that a restart or a recovery went back to is gone."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "start" or (event["event"] == "recovery" and not _restarted(kept)):
            at = event.get("step") or 0
            kept = [old for old in kept if old["event"] not in _STEPPED or old["step"] <= at]
        kept.append(event)
    return kept


def _restarted(events: Sequence[Event]) -> bool:
    """Whether new processes have begun since the failure: the recovery may be told when they have made steps already."""
    last = next(
        (event["event"] for event in reversed(events) if event["event"] in ("start", "failure", "recovery")),
        None,
    )
    return last == "start" and len(of_kind(events, "start")) > 1


def recovery_starts(events: Sequence[Event]) -> set[int]:
    """Places of the starts that belong to a recovery: they have its step, and no other start lies between the two."""
    starts = [place for place, event in enumerate(events) if event["event"] == "start"]
    unmatched = [place for place, event in enumerate(events) if event["event"] == "recovery"]
    found: set[int] = set()
    for before, place, after in zip(starts, starts[1:], [*starts[2:], len(events)], strict=False):
        step = events[place].get("step") or 0
        match = next(
            (at for at in unmatched if before < at < after and (events[at].get("step") or 0) == step), None
        )
        if match is not None:
            unmatched.remove(match)
            found.add(place)
    return found


def split_sessions(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each time the run was begun or taken up by its user; restarts of workers are part of theirs."""
    recovered = recovery_starts(events)
    cuts = [
        place
        for place, event in enumerate(events)
        if event["event"] == "start" and place and place not in recovered
    ]
    return [list(events[begin:end]) for begin, end in pairwise([0, *cuts, len(events)]) if end > begin]


_STEPPED = {"step", "evaluate", "epoch", "phases", "exchange", "load", "monitor"}


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def by_step(events: Iterable[Event], kind: str = "step") -> list[Event]:
    """The last line of each step, in order of steps."""
    last = {event["step"]: event for event in events if event["event"] == kind}
    return [last[step] for step in sorted(last)]


def truncate_torn_line(path: Path) -> None:
    """Cut off the torn line of a writer that was killed."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = whole = file.seek(0, os.SEEK_END)
        while whole:
            begin = max(0, whole - _TAIL)
            file.seek(begin)
            line_end = file.read(whole - begin).rfind(b"\n")
            whole = begin + line_end + 1 if line_end >= 0 else begin
            if line_end >= 0:
                break
    if whole != end:
        os.truncate(path, whole)
