"""Reader of event logs: the lines of the workers' file, merged with those of the driver's.

An event of the driver follows what the workers had written by then."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.record.events.kinds import JsonEvent

_MAX_DEPTH = 32
_TAIL_BYTES = 2**20
POSITION = "worker_bytes"
"""Field of the driver's events: the bytes of the workers' file that they follow. Readers drop it."""


def driver_path(path: Path) -> Path:
    """Return the file of the driver's events that belongs to the workers' file."""
    return path.with_suffix(".driver.jsonl")


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


def read_events(path: Path) -> list[JsonEvent]:
    """Return the events of a file in order, with those of the driver where they belong.

    Lines that are no events are skipped; a missing file has none."""
    return list(stream_events(path))


def stream_events(path: Path) -> Iterator[JsonEvent]:
    """Yield the events of ``read_events`` one by one: a long record does not fit into the memory."""
    for line in merged_lines(path):
        event = line if isinstance(line, dict) else parse_event(line)
        if event is not None:
            yield event


def merged_lines(path: Path, begin: Extent = START, end: Extent | None = None) -> Iterator[bytes | JsonEvent]:
    """Yield the lines of the workers between two extents, and the driver's events where they belong."""
    driver_end = end.driver if end is not None else None
    driver_lines = read_lines(driver_path(path), begin.driver, driver_end)
    waiting = deque(event for line in driver_lines if (event := parse_event(line)) is not None)
    lines = read_lines(path, begin.workers, end.workers if end is not None else None)
    yield from merge_lines(lines, begin.workers, waiting)
    yield from map(without_position, waiting)


def merge_lines(lines: Iterable[bytes], begin: int, waiting: deque[JsonEvent]) -> Iterator[bytes | JsonEvent]:
    """Yield lines of the workers from the byte ``begin`` on, and the driver's events that follow them.

    Takes these events from ``waiting``: the others follow later lines."""
    position = begin
    for line in lines:
        yield from _due(waiting, position)
        yield line
        position += len(line)
    yield from _due(waiting, position)


def _due(waiting: deque[JsonEvent], position: int) -> Iterator[JsonEvent]:
    while waiting and driver_position(waiting[0]) <= position:
        yield without_position(waiting.popleft())


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


def without_position(event: JsonEvent) -> JsonEvent:
    return {name: value for name, value in event.items() if name != POSITION}


def driver_position(event: JsonEvent) -> int:
    """Return how many bytes of the workers' file an event of the driver follows."""
    position = event.get(POSITION)
    return position if isinstance(position, int) else 0


def last_events(path: Path) -> list[JsonEvent]:
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


def parse_event(line: bytes) -> JsonEvent | None:
    """Return the event of a line; None for any other content, such as the torn line of a killed writer."""
    try:
        # Of bytes json would guess the encoding.
        event = json.loads(str(line, "utf-8"))
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


def of_kind(events: Iterable[JsonEvent], kind: str) -> list[JsonEvent]:
    return [event for event in events if event["event"] == kind]


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
