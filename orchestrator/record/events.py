"""The run's record: one JSON object a line, appended and flushed. Everything that looks at a run reads these lines.

| event      | fields besides ``event`` and ``time`` (unix seconds)                                                    |
|------------|---------------------------------------------------------------------------------------------------------|
| start      | version, task, strategy, workers, device, precision, global_batch_size, parameters, total_steps, step     |
| step       | step (from 1), epoch, loss, grad_norm, lr, samples, units, seconds, metrics {name: mean over the batch};  |
|            | warm_up true on the first steps of a process                                                              |
| phases     | step, steps, seconds per step of: data, forward, backward, optimizer; total                               |
| load       | step, steps, loads [layer][expert]: tokens per expert summed over those steps                              |
| epoch      | epoch, step, seconds, samples, loss (mean), samples_per_second, memory {allocated, reserved}               |
| evaluate   | step, epoch, loss, metrics, samples, seconds, best                                                        |
| checkpoint | step, path, bytes, seconds                                                                                |
| monitor    | step, host {cpu_percent, memory_used, memory_total, process_memory}, devices [{index, name, …}]            |
| oom        | step, micro_batch, next_micro_batch, where                                                                |
| compile    | status, seconds, detail                                                                                   |
| warning    | kind, message                                                                                             |
| resume     | step, path, skipped [{path, reason}]                                                                      |
| failure    | kind, message                                                                                             |
| end        | status, reason, steps, seconds, memory {allocated, reserved}: the most of the run                          |

A step replayed after a restart is appended again: readers take its last line (``by_step``). A torn final line, left by
a killed writer, is dropped by readers and cut off before the next append.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]


class EventLog:
    """Appends events to a file and hands each to its listeners (progress bar, trackers), in order."""

    def __init__(self, path: Path, listeners: Iterable[Listener] = ()) -> None:
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._listeners = tuple(listeners)

    def write(self, event: str, **fields: Any) -> None:
        self.write_all([{"event": event, "time": time.time(), **fields}])

    def write_all(self, events: Iterable[Event]) -> None:
        """Several events in one write: a kill in between leaves whole lines and at most one torn one."""
        events = list(events)
        self._file.write("".join(encode(event) + "\n" for event in events))
        self._file.flush()
        for listener in self._listeners:
            for event in events:
                listener(event)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def encode(event: Mapping[str, Any]) -> str:
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
    """All whole lines of the file, in order. Lines that are not JSON objects are skipped."""
    if not path.exists():
        return []
    events: list[Event] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:  # the torn line of a killed writer
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events


def present(events: Iterable[Event]) -> list[Event]:
    """The events of the run as it went: what a process recorded past the step that a later one started from is gone."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "start":
            at = event.get("step") or 0
            kept = [old for old in kept if old["event"] not in _STEPPED or old["step"] <= at]
        kept.append(event)
    return kept


_STEPPED = {"step", "evaluate", "epoch", "phases", "load", "monitor"}


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def by_step(events: Iterable[Event], kind: str = "step") -> list[Event]:
    """The last line of each step, in order of steps."""
    last = {event["step"]: event for event in events if event["event"] == kind}
    return [last[step] for step in sorted(last)]


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
