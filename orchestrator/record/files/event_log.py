"""The event log of a run: one JSON object per line, appended and flushed.

Each file has one writer. ``events.jsonl`` is written by the main worker, or by the only process of a
run; the driver of several workers writes its own events (``failure``, ``recovery``, ``final``, warnings,
and the ``end`` of a run that failed) to ``events.driver.jsonl`` (see ``DriverLog``).

A killed writer can leave a torn final line. Readers drop it, and the next writer cuts it off before
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.record.events import kinds
from orchestrator.record.events.decoding import to_json
from orchestrator.record.events.kinds import Event, JsonEvent, decode_event
from orchestrator.record.files.reading import POSITION, driver_path, whole_line_bytes
from orchestrator.redaction import Secrets, mask, mask_tree

Listener = Callable[[Event], None]

_logger = logging.getLogger("orchestrator")

MAX_HELD = 10_000
"""Events that are held back while they cannot be written. Of more, every other one of steps is dropped."""
_FREQUENT = (kinds.Step, kinds.Phases, kinds.Exchange, kinds.Load, kinds.Monitor, kinds.Logged)
_RETRY_SECONDS = 1.0
# ``json.dumps`` with options makes an encoder for each line.
_ENCODER = json.JSONEncoder(default=to_json, allow_nan=False)
_Line = tuple[str, Event]
"""A line of the file, and its event."""


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
        self._held: list[_Line] = []
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

    def write(self, *events: Event) -> None:
        """Write events at once, with the time of now if they have none.

        A kill in between leaves whole lines and at most one torn line."""
        now = time.time()
        timed = [event if event.time is not None else replace(event, time=now) for event in events]
        lines = [self._masked(event) for event in timed]
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self._path} is closed")
            self._held += lines
            notes = self._write_held()
            for listener in self._listeners:
                for _, event in (*lines, *notes):
                    listener(event)

    def _write_held(self, at_once: bool = False) -> list[_Line]:
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

    def _hold_back(self, error: OSError) -> list[_Line]:
        is_first = self._retry_s is None
        self._retry_s = time.monotonic() + _RETRY_SECONDS
        self._thin_held()
        if not is_first:
            return []
        # A warning about the warning would have no end: it is held back with the others.
        warning = self._masked(_warning(f"{cannot_write(self._path, error)}. The run goes on without"))
        self._held.append(warning)
        return [warning]

    def _warn(self, message: str) -> list[_Line]:
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
        kept: list[_Line] = []
        is_dropped = True
        for entry in self._held:
            if isinstance(entry[1], _FREQUENT):
                is_dropped = not is_dropped
                if is_dropped:
                    continue
            kept.append(entry)
        self._num_left_out += len(self._held) - len(kept)
        self._held = kept

    def _masked(self, event: Event) -> _Line:
        """Return an event's line and the event itself, both without secrets."""
        # Few events hold a secret. One search over the line is cheaper than a walk through every
        # event.
        line = encode_event(self._content(event))
        if mask(line, self._secrets) == line:
            return line, event
        # Names of events and fields are ours and are read back, so they stay, even if a secret is
        # part of one. Names of metrics come from the task and are masked.
        fields = json.loads(line)
        clean = {
            name: mask_tree(value, self._secrets, keys=name == "metrics") for name, value in fields.items()
        }
        clean["event"] = fields["event"]
        # Without a field that makes it, the event does not reach the listeners.
        return json.dumps(clean), decode_event(clean) or kinds.LeftOut(time=event.time)

    def _content(self, event: Event) -> Event | JsonEvent:
        """Return what the line of an event has."""
        return event

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

    def _content(self, event: Event) -> Event | JsonEvent:
        return {**to_json(event), POSITION: whole_line_bytes(self._workers_path)}


def cannot_write(path: Path, error: OSError) -> str:
    """Return why a file cannot be written, and what to do, in words."""
    return f"cannot write {path}: {error.strerror or error}; make room there, or lift the quota"


def _warning(message: str) -> Event:
    return kinds.Warned(time=time.time(), kind="record", message=message)


def encode_event(content: Any) -> str:
    """Return an event, or any tree of such values, as one line of JSON.

    Numbers that JSON lacks (nan, inf) become text."""
    try:
        return _ENCODER.encode(content)
    except ValueError:
        return json.dumps(without_nan(json.loads(json.dumps(content, default=to_json))))


def without_nan(value: Any) -> Any:
    """Return a tree of plain values with text for numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def truncate_torn_line(path: Path) -> None:
    """Cut off the unfinished last line that a killed writer left."""
    if not path.is_file():
        return
    whole_bytes = whole_line_bytes(path)
    if whole_bytes != path.stat().st_size:
        os.truncate(path, whole_bytes)
