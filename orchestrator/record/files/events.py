"""The event log of a run: one JSON object per line, appended and flushed. Every reader of a run
reads these lines.

| event      | fields besides ``event`` and ``time`` (unix seconds)                                       |
|------------|--------------------------------------------------------------------------------------------|
| start      | version, task, strategy (single, data_parallel, expert_parallel), workers, device,         |
|            | precision, global_batch_size, parameters, total_steps, step, best_by (the metric of the    |
|            | best evaluation and its direction: "loss:min"), build_seconds (to build or                 |
|            | restore the state, once the workers have formed their group); on several workers also      |
|            | backend, sharding, nodes and, where they differ, shares [fraction of the global batch by   |
|            | worker]; expert parallel also gate (replicated, primary)                                   |
| placement  | step (steps done when it takes effect), method (exact, lpt, round_robin, file),            |
|            | hosts [{rank, node, device, name, speed (measured FLOP/s), memory (bytes or null)}],       |
|            | layers [{name, host_of [rank by expert, or list of the ranks of its copies], sizes         |
|            | [cost of a row, by expert], costs [predicted work by expert], seconds [predicted, by       |
|            | host], bound, imbalance, gap; ids and splits [by expert, see ``expert``] once the          |
|            | experts are not the initial ones}], sentence for people                                    |
| step       | step (from 1), epoch, loss, grad_norm, lr, samples, units, seconds, metrics {name: mean    |
|            | over the batch}; warm_up is true on the first steps of a process                           |
| phases     | step, steps; seconds per step of data, forward, backward, optimizer and, on several        |
|            | workers, communication; total; warm_up as in ``step``                                      |
| exchange   | step, steps; per step: bytes (sent to other hosts, summed over hosts), seconds (waiting    |
|            | time, mean over hosts), rows (sent, summed over hosts); warm_up as in ``step``             |
| load       | step, steps, loads [layer][expert]: tokens per expert summed over those steps; ids         |
|            | [layer][expert] once the experts are not the initial ones                                  |
| expert     | step (steps done when it takes effect), change (born, warmed, merged, pruned, moved,       |
|            | copied, undone), layer, layer_name, ids, parents, hosts [ranks of the copies, by id],      |
|            | splits [shares of the copies, by id, as whole numbers; empty: equal],                      |
|            | reason, loss_before, loss_after (validation, or null), output_change (relative change of   |
|            | the layer's output, or null), seconds, experts (of the layer afterwards); an ``undone``    |
|            | event follows directly on the change that it undoes, with the same ids and parents         |
|expert_graph| step, epoch, layers [{layer, name, experts [{id, size, share (of the choices since the     |
|            | last sleep), hosts [rank], age (steps since birth), parents, warming}], coactivation       |
|            | [[id, id, share of the rarer one's tokens that also chose the other]], similarity          |
|            | [[id, id, -1 to 1]]}]; pairs with small values are left out                                |
| epoch      | epoch, step, seconds (of its steps), samples, loss (mean), samples_per_second, memory      |
|            | {allocated, reserved}                                                                      |
| evaluate   | step, epoch, loss, metrics, samples, seconds, best                                         |
| checkpoint | step, path, bytes, seconds (until it is safe on disk), stall (the part of the seconds      |
|            | during which the loop was blocked)                                                         |
| upload     | step, path, bytes, seconds: the checkpoint is published in the remote folder of the run;   |
|            | it may come before the ``checkpoint`` event of its step: a thread of its own uploads       |
| monitor    | step, host {cpu_percent, memory_used, memory_total, process_memory}, devices [{index,      |
|            | name, …}]                                                                                  |
| oom        | step, micro_batch, next_micro_batch, where                                                 |
| compile    | status, seconds, detail                                                                    |
| warning    | kind, message                                                                              |
| notice     | message about an operation that takes a while                                              |
| resume     | step, path, skipped [{path, reason}]; source is "memory" without a checkpoint              |
| settings   | step, changes [{name, before, now, origin}]: differences from the earlier start of a       |
|            | resumed run                                                                                |
| failure    | kind, message, rank (or null), step, final: only a final failure ends the run              |
| recovery   | attempt, reason, workers_before, workers, step (that training continues from),             |
|            | lost_steps, source (memory, disk), detect_seconds, regroup_seconds, restore_seconds,       |
|            | replay_seconds (to repeat the lost steps), total_seconds: from the                         |
|            | failure until the first step after it is done; with ``--expert-replicas`` also             |
|            | expert_replicas_before, expert_replicas: groups of hosts that hold every expert            |
| log        | step, values {name: number}: what a callback asked to log                                  |
| end        | status, reason, steps, seconds, memory {allocated, reserved}: the peak of the run          |
| final      | step (whose weights the model has in the end), weights (best, last), reason, seconds (of   |
|            | the whole run, by the process that the user started); after ``end``                        |

Each file has one writer. ``events.jsonl`` is written by the main worker, or by the only process of a
run; the driver of several workers writes its own events (``failure``, ``recovery``, ``final``, warnings,
and the ``end`` of a run that failed) to ``events.driver.jsonl`` (see ``DriverLog``). ``read_events`` and
``tail.Follower`` merge the two: an event of the driver follows what the workers had written by then.

A step replayed after a restart is appended again: readers take its last line (``by_step``). A
killed writer can leave a torn final line. Readers drop it, and the next writer cuts it off before
it appends. A run that restarts its workers after a failure writes ``failure``, ``recovery`` and, if
the workers are new processes, another ``start``, before or after ``recovery``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.redaction import Secrets, mask, mask_tree

Event = dict[str, Any]
PositionedEvent = tuple[int, Event]
"""An event, and the byte of its file at which its line begins."""
Listener = Callable[[Event], None]

_logger = logging.getLogger("orchestrator")

MAX_HELD = 10_000
"""Events that are held back while they cannot be written. Of more, every other one of steps is dropped."""
_FREQUENT = frozenset({"step", "phases", "exchange", "load", "monitor", "log"})
_RETRY_SECONDS = 1.0
_MAX_DEPTH = 32
_TAIL_BYTES = 2**20
_POSITION = "worker_bytes"
"""Field of the driver's events: the bytes of the workers' file that they follow. Readers drop it."""


class EventLog:
    """Appends events to a file and passes each to the listeners (progress bar, trackers), in order.

    ``secrets`` are masked in the file and for the listeners. Events that a full disk does not take
    are held back, and written when there is space again: the record never ends a run."""

    def __init__(self, path: Path, listeners: Iterable[Listener] = (), *, secrets: Secrets = ()) -> None:
        truncate_torn_line(path)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._listeners = tuple(listeners)
        self._secrets = secrets
        self._held: list[tuple[str, Event]] = []
        """Lines that are not in the file yet, with their events."""
        self._num_left_out = 0
        self._retry_s: float | None = None
        """When held events are tried again; None while events can be written."""
        # Uploads write from a thread of their own; a listener may write too.
        self._lock = threading.RLock()

    @property
    def held(self) -> list[Event]:
        """The events that could not be written so far."""
        return [event for _, event in self._held]

    def write(self, event: str, **fields: Any) -> None:
        self.write_all([{"event": event, "time": time.time(), **fields}])

    def write_all(self, events: Iterable[Event]) -> None:
        """Write several events at once: a kill in between leaves whole lines and at most one torn line."""
        masked = [self._masked(event) for event in events]
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self._path} is closed")
            self._held += masked
            notes = self._write_held()
            for listener in self._listeners:
                for _, event in (*masked, *notes):
                    listener(event)

    def _write_held(self, at_once: bool = False) -> list[tuple[str, Event]]:
        """Write the lines that are not in the file yet, or hold them back. Return the warnings about it."""
        if self._retry_s is not None and not at_once and time.monotonic() < self._retry_s:
            self._thin_held()
            return []
        try:
            self._append("".join(line + "\n" for line, _ in self._held).encode())
        except OSError as error:
            return self._hold_back(error)
        num_held = len(self._held)
        self._held = []
        if self._retry_s is None:
            return []
        self._retry_s = None
        left_out = f"; {self._num_left_out} of steps were left out meanwhile" if self._num_left_out else ""
        self._num_left_out = 0
        return self._warn(f"{self._path} can be written again: {num_held} events were held back{left_out}")

    def _hold_back(self, error: OSError) -> list[tuple[str, Event]]:
        is_first = self._retry_s is None
        self._retry_s = time.monotonic() + _RETRY_SECONDS
        self._thin_held()
        if not is_first:
            return []
        # A warning about the warning would have no end: it is held back with the others.
        warning = self._masked(_warning(f"{cannot_write(self._path, error)}. The run goes on without"))
        self._held.append(warning)
        return [warning]

    def _warn(self, message: str) -> list[tuple[str, Event]]:
        """Write a warning, and return it for the listeners."""
        warning = self._masked(_warning(message))
        self._held.append(warning)
        return [warning, *self._write_held(at_once=True)]

    def _append(self, data: bytes) -> None:
        """Append whole lines, or nothing."""
        file = self._file.fileno()
        size = os.fstat(file).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise

    def _thin_held(self) -> None:
        """Drop every other event of steps when there are too many: the memory is needed for training."""
        if len(self._held) <= MAX_HELD:
            return
        kept: list[tuple[str, Event]] = []
        is_dropped = True
        for entry in self._held:
            if entry[1]["event"] in _FREQUENT:
                is_dropped = not is_dropped
                if is_dropped:
                    continue
            kept.append(entry)
        self._num_left_out += len(self._held) - len(kept)
        self._held = kept

    def _masked(self, event: Event) -> tuple[str, Event]:
        """Return an event's line and the event itself, both without secrets."""
        # Few events hold a secret. One search over the line is cheaper than a walk through every
        # event.
        line = encode_event(event)
        if mask(line, self._secrets) == line:
            return line, event
        # Names of events and fields are ours and are read back, so they stay, even if a secret is
        # part of one. Names of metrics come from the task and are masked.
        clean = {
            name: mask_tree(value, self._secrets, keys=name == "metrics") for name, value in event.items()
        }
        clean["event"] = event["event"]
        return encode_event(clean), clean

    def close(self) -> None:
        """Write what is held back, and close. ``held`` has what could not be written."""
        with self._lock:
            if self._file.closed:
                return
            if self._held:
                self._write_held(at_once=True)
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                _logger.warning("%s", cannot_write(self._path, error))
            self._file.close()


class DriverLog(EventLog):
    """The driver's own events, in a file beside that of the workers.

    Appends of two machines to one file can overwrite each other on a network drive, and their clocks
    differ. So each event says how much of the workers' file it follows."""

    def __init__(self, path: Path, listeners: Iterable[Listener] = (), *, secrets: Secrets = ()) -> None:
        """``path`` is the workers' file."""
        super().__init__(driver_path(path), listeners, secrets=secrets)
        self._workers_path = path

    def write_all(self, events: Iterable[Event]) -> None:
        position = whole_line_bytes(self._workers_path)
        super().write_all([{**event, _POSITION: position} for event in events])


def cannot_write(path: Path, error: OSError) -> str:
    """Return why a file cannot be written, and what to do, in words."""
    return f"cannot write {path}: {error.strerror or error}; make room there, or lift the quota"


def _warning(message: str) -> Event:
    return {"event": "warning", "time": time.time(), "kind": "record", "message": message}


def driver_path(path: Path) -> Path:
    """Return the file of the driver's events that belongs to the workers' file."""
    return path.with_suffix(".driver.jsonl")


def encode_event(event: Mapping[str, Any]) -> str:
    """Return an event as one line of JSON; numbers that JSON lacks (nan, inf) become text."""
    try:
        return json.dumps(event, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(event), allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


@dataclass(frozen=True)
class Extent:
    """A number of bytes of the workers' file and of the driver's file, in whole lines."""

    workers: int = 0
    driver: int = 0


START = Extent()


def extent_of(path: Path) -> Extent:
    """Return the whole lines that an event log has now."""
    # The workers' file first: a line that the driver adds meanwhile follows these lines.
    workers = whole_line_bytes(path)
    return Extent(workers, whole_line_bytes(driver_path(path)))


def read_events(path: Path) -> list[Event]:
    """Return the events of a file in order, with those of the driver where they belong.

    Lines that are no events are skipped; a missing file has none."""
    return list(stream_events(path))


def stream_events(path: Path) -> Iterator[Event]:
    """Yield the events of ``read_events`` one by one: a long record does not fit into the memory."""
    for line in merged_lines(path):
        event = line if isinstance(line, dict) else parse_event(line)
        if event is not None:
            yield event


def merged_lines(path: Path, begin: Extent = START, end: Extent | None = None) -> Iterator[bytes | Event]:
    """Yield the lines of the workers between two extents, and the driver's events where they belong."""
    driver_end = end.driver if end is not None else None
    driver_lines = read_lines(driver_path(path), begin.driver, driver_end)
    waiting = deque(event for line in driver_lines if (event := parse_event(line)) is not None)
    position = begin.workers
    for line in read_lines(path, begin.workers, end.workers if end is not None else None):
        while waiting and driver_position(waiting[0]) <= position:
            yield _without_position(waiting.popleft())
        yield line
        position += len(line)
    yield from map(_without_position, waiting)


def read_lines(path: Path, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file between two bytes; none of a missing file."""
    if not path.is_file():
        return
    with path.open("rb", buffering=_TAIL_BYTES) as file:
        file.seek(begin)
        for line in file:
            if end is not None and begin >= end:
                return
            yield line
            begin += len(line)


def parse_lines(lines: Iterable[bytes], begin: int) -> list[PositionedEvent]:
    """Return the events of lines, which follow each other in a file from the byte ``begin`` on."""
    events: list[PositionedEvent] = []
    for line in lines:
        event = parse_event(line)
        if event is not None:
            events.append((begin, event))
        begin += len(line)
    return events


def merge_events(worker_events: Iterable[PositionedEvent], driver_events: Iterable[Event]) -> list[Event]:
    """Return all events in one order, which is that of each writer.

    An event of the driver follows the lines that the workers had written by then."""
    merged: list[Event] = []
    remaining = deque(worker_events)
    for event in driver_events:
        position = driver_position(event)
        while remaining and remaining[0][0] < position:
            merged.append(remaining.popleft()[1])
        merged.append(_without_position(event))
    return merged + [event for _, event in remaining]


def _without_position(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != _POSITION}


def driver_position(event: Event) -> int:
    """Return how many bytes of the workers' file an event of the driver follows."""
    position = event.get(_POSITION)
    return position if isinstance(position, int) else 0


def last_events(path: Path) -> list[Event]:
    """Return the events in the last megabyte of a file that may be long, without those of the driver."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")
    # A read that starts inside the file starts inside a line.
    whole_lines = lines[1:] if start else lines
    return [event for line in whole_lines if line and (event := parse_event(line)) is not None]


def last_recorded_step(path: Path) -> int:
    """Return the last step that an event log names; 0 without one."""
    # Any event: large ones of experts may fill the end of the file that is read.
    steps = (event.get("step") for event in reversed(last_events(path)))
    return next((step for step in steps if isinstance(step, int)), 0)


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line; None for any other content, such as the torn line of a killed writer."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    # Counting brackets settles almost every line without a walk through the tree.
    num_brackets = line.count(b"[") + line.count(b"{")
    return event if num_brackets <= _MAX_DEPTH or is_shallow(event) else None


def is_shallow(value: Any, max_depth: int = _MAX_DEPTH) -> bool:
    """Return whether recursive readers can walk through a tree of plain values; runs write a
    handful of levels."""
    children: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        children = value.values()
    nested = [child for child in children if isinstance(child, dict | list)]
    return max_depth > 0 and all(is_shallow(child, max_depth - 1) for child in nested)


def recovery_starts(events: Sequence[Event]) -> set[int]:
    """Return the indices of the ``start`` events that belong to a recovery.

    Such a start has the step of the recovery, and no other start lies between the two.
    """
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    unmatched = [index for index, event in enumerate(events) if event["event"] == "recovery"]
    matched: set[int] = set()
    # The first start begins the run. The neighbours of each later one bound the search for its
    # recovery.
    for before, start, after in zip(starts, starts[1:], [*starts[2:], len(events)], strict=False):
        step = events[start].get("step") or 0
        recovery = next(
            (
                index
                for index in unmatched
                if before < index < after and (events[index].get("step") or 0) == step
            ),
            None,
        )
        if recovery is not None:
            unmatched.remove(recovery)
            matched.add(start)
    return matched


def split_sessions(events: Sequence[Event]) -> list[list[Event]]:
    """Split events at each time the user began or resumed the run; restarts of workers split nothing."""
    of_recovery = recovery_starts(events)
    cuts = [
        _session_begin(events, index)
        for index, event in enumerate(events)
        if event["event"] == "start" and index and index not in of_recovery
    ]
    return [list(events[begin:end]) for begin, end in pairwise([0, *cuts, len(events)]) if end > begin]


def _session_begin(events: Sequence[Event], start: int) -> int:
    """Return the index of the first event of the session with this ``start`` event.

    A resumed run records the checkpoint that it has read before it starts."""
    begin = start
    for index in range(start - 1, -1, -1):
        if events[index]["event"] not in ("resume", "warning"):
            break
        if events[index]["event"] == "resume":
            begin = index
    return begin


def last_end(sessions: Sequence[Sequence[Event]]) -> Event | None:
    """Return the ``end`` event that says how a run ended; None if its process was killed.

    A resume that trained nothing does not undo an earlier end: it found nothing left to do, or failed."""
    ends: list[Event | None] = [next(iter(of_kind(session, "end")[-1:]), None) for session in sessions]
    while len(ends) > 1 and not has_trained(sessions[len(ends) - 1]):
        earlier = ends[-2]
        is_completed = ends[-1] is not None and ends[-1].get("status") == "completed"
        if earlier is None or (is_completed and earlier.get("status") != "completed"):
            break
        ends.pop()
    return ends[-1] if ends else None


def has_trained(session: Iterable[Event]) -> bool:
    """Return whether a session has steps, or stands for some that a long record leaves out."""
    return any(event["event"] == "step" or event.get("num_steps") for event in session)


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def by_step(events: Iterable[Event], kind: str = "step") -> list[Event]:
    """Return the last line of each step, in order of steps."""
    last = {event["step"]: event for event in events if event["event"] == kind}
    return [last[step] for step in sorted(last)]


def truncate_torn_line(path: Path) -> None:
    """Cut off the unfinished last line that a killed writer left."""
    if not path.is_file():
        return
    whole_bytes = whole_line_bytes(path)
    if whole_bytes != path.stat().st_size:
        os.truncate(path, whole_bytes)


def whole_line_bytes(path: Path, max_bytes: int | None = None) -> int:
    """Return the number of bytes up to the last newline, within the first ``max_bytes`` if given."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if max_bytes is not None:
            end = min(end, max_bytes)
        # Search backwards, block by block: the file may be long, and a torn line longer than one
        # block.
        while end:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
