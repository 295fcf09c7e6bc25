"""Saved folds of a record, so that a long one need not be read from its beginning.

``events_index/`` beside the record holds a few files, each with the fold of the first bytes of the record, by
which it is named. A reader takes the newest one that fits the record, and continues it. The files are a
cache: without them, or if they are damaged, the record is read as a whole, in constant memory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from orchestrator.record.events.decoding import decode, to_json
from orchestrator.record.events.effective import MARKERS
from orchestrator.record.events.kinds import Checkpoint, Event, JsonEvent, Step, decode_event
from orchestrator.record.files.reading import (
    Extent,
    driver_path,
    driver_position,
    extent_of,
    is_shallow,
    merged_lines,
    parse_event,
    read_lines,
)
from orchestrator.record.summary.fold import RunFold
from orchestrator.storage.local_files import write_whole

FOLDER = "events_index"
SAVE_BYTES = 2**22
"""Bytes of the record between two saved folds: about 13,000 events, which are read in 0.2 s."""
MAX_UNSAVED_BYTES = 8 * SAVE_BYTES
"""Bytes from which on a fold is saved without a checkpoint."""
_FORMAT = 3
_MAX_FILE_BYTES = 2**28
_CHECKED_BYTES = 4096
_FILE_NAME = re.compile(r"\d{15}\.json", re.ASCII)
_STEP_TEXT = b'{"event": "step"'
_MARKER_TEXTS = tuple(f'"{marker.EVENT}"'.encode() for marker in MARKERS)

_logger = logging.getLogger("orchestrator")


class FoldKeeper:
    """Saves the fold of a record while it grows. A listener of the run's events, in a process that sees all.

    A fold is saved at a checkpoint: a restart from there discards nothing that the fold contains."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved_bytes = max(_saved(path), default=0)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Checkpoint | Step):
            return
        least = SAVE_BYTES if isinstance(event, Checkpoint) else MAX_UNSAVED_BYTES
        size = _size(self._path)
        if size - self._saved_bytes >= least:
            self._saved_bytes = size
            save_fold(self._path)


def save_fold(path: Path) -> None:
    """Save the fold of the record ``path`` if it has grown much since the last time."""
    try:
        end = _settled_extent(path)
        if end.workers - max(_saved(path), default=0) >= SAVE_BYTES:
            _write(path, _fold(path, end))
    except OSError as error:
        # Readers can do without it: a full disk or a folder of someone else does not matter.
        _logger.debug("the index of %s could not be written: %s", path, error)


def read_fold(path: Path, held: Iterable[Event] = ()) -> RunFold:
    """Return the fold of the whole lines that the record ``path`` has now. A missing record has none.

    ``held`` are the newest events, which could not be written to it."""
    fold = _fold(path, extent_of(path))
    for event in held:
        fold.add(event)
    return fold


def _fold(path: Path, end: Extent) -> RunFold:
    """Return the fold of the record up to an extent, from the newest saved one that fits."""
    for only_markers in (True, False):
        for fold in _saved_folds(path, end):
            limits = _limits(path, fold, end, only_markers)
            if limits is not None and _continue(fold, path, end, limits):
                return fold
    raise AssertionError("the empty fold fits every record")


def _limits(path: Path, fold: RunFold, end: Extent, only_markers: bool) -> list[tuple[int, float]] | None:
    """Return the lines behind a fold that discard events, each with the lowest step that training continues
    from then or later. None if one of them discards events of the fold.

    ``only_markers``: without steps that come again after a damaged restart, to find which takes long."""
    rollbacks = replace(fold.rollbacks)
    steps: list[tuple[int, float]] = []
    for number, line in enumerate(merged_lines(path, fold.extent, end)):
        # Most lines are steps. A search in their bytes is faster than to parse them.
        if only_markers and isinstance(line, bytes) and not _may_be_marker(line):
            continue
        event = _decoded(line)
        if event is None or (only_markers and not isinstance(event, MARKERS)):
            continue
        step = rollbacks.add(event)
        if step is not None:
            if fold.max_step is not None and step < fold.max_step:
                return None
            steps.append((number, step))
    lowest = math.inf
    limits: list[tuple[int, float]] = []
    for number, step in reversed(steps):
        lowest = min(lowest, step)
        limits.append((number, lowest))
    return limits[::-1]


def _continue(fold: RunFold, path: Path, end: Extent, limits: list[tuple[int, float]]) -> bool:
    """Add the events behind a fold to it. Return False if one discards events and is not in ``limits``."""
    known = iter([*limits, (-1, math.inf)])
    next_number, limit = next(known)
    for number, line in enumerate(merged_lines(path, fold.extent, end)):
        is_known = number == next_number
        if is_known:
            next_number, limit = next(known)
        event = _decoded(line)
        if event is not None and fold.add(event, limit) is not None and not is_known:
            return False
    fold.extent = end
    return True


def _may_be_marker(line: bytes) -> bool:
    return not line.startswith(_STEP_TEXT) and any(text in line for text in _MARKER_TEXTS)


def _decoded(line: bytes | JsonEvent) -> Event | None:
    content = line if isinstance(line, dict) else parse_event(line)
    return decode_event(content) if content is not None else None


def _settled_extent(path: Path) -> Extent:
    """Return the extent of a record without the driver's events that follow later lines of the workers."""
    end = extent_of(path)
    size = 0
    for line in read_lines(driver_path(path), 0, end.driver):
        event = parse_event(line)
        if event is not None and driver_position(event) > end.workers:
            break
        size += len(line)
    return replace(end, driver=size)


def _saved_folds(path: Path, end: Extent) -> Iterator[RunFold]:
    """Yield the saved folds that fit the record, the newest first, and the empty one."""
    for size, file in sorted(_saved(path).items(), reverse=True):
        fold = _read(path, file) if size <= end.workers else None
        if fold is not None and fold.extent.driver <= end.driver and _has_no_late_events(path, fold):
            yield fold
    yield RunFold()


def _has_no_late_events(path: Path, fold: RunFold) -> bool:
    """Return whether all events that the driver has added follow the lines that the fold contains."""
    added = _events(read_lines(driver_path(path), fold.extent.driver))
    return all(driver_position(event) >= fold.extent.workers for event in added)


def _events(lines: Iterable[bytes]) -> Iterator[JsonEvent]:
    return (event for line in lines if (event := parse_event(line)) is not None)


def _saved(path: Path) -> dict[int, Path]:
    """Return the files of the index by the bytes of the record that they contain."""
    folder = path.with_name(FOLDER)
    # A folder of unknown origin may have a link here.
    if folder.is_symlink() or not folder.is_dir():
        return {}
    files = [file for file in folder.iterdir() if _FILE_NAME.fullmatch(file.name)]
    return {int(file.stem): file for file in files if file.is_file() and not file.is_symlink()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write(path: Path, fold: RunFold) -> None:
    folder = path.with_name(FOLDER)
    if folder.is_symlink():
        raise OSError(f"{folder} is a link")
    folder.mkdir(exist_ok=True)
    content = {"format": _FORMAT, "checked": _last_bytes(path, fold.extent), "fold": fold}
    data = json.dumps(content, default=to_json).encode()
    write_whole(
        folder / f"{fold.extent.workers:015d}.json", hashlib.sha256(data).hexdigest().encode() + b"\n" + data
    )
    _remove_needless(path)


def _remove_needless(path: Path) -> None:
    """Keep the two newest folds, and earlier ones whose distances from the newest double.

    A restart from an earlier step reads at most about as much again as it discards."""
    files = _saved(path)
    newest = max(files)
    kept = newest
    for size in sorted(files, reverse=True)[1:]:
        if newest - size >= 2 * (newest - kept):
            kept = size
        else:
            files[size].unlink(missing_ok=True)


def _read(path: Path, file: Path) -> RunFold | None:
    """Return the fold of a file; None if it is damaged, or of another record."""
    if file.stat().st_size > _MAX_FILE_BYTES:
        return None
    try:
        digest, _, data = file.read_bytes().partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() != digest:
            return None
        content = json.loads(data)
        if content["format"] != _FORMAT or not is_shallow(content):
            return None
        fold = decode(RunFold, content["fold"])
        is_of_record = fold is not None and content["checked"] == _last_bytes(path, fold.extent)
        return fold if is_of_record else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _last_bytes(path: Path, extent: Extent) -> list[str]:
    """Return a hash of the last bytes of each file within an extent: a record may have been replaced."""
    sizes = {path: extent.workers, driver_path(path): extent.driver}
    return [hashlib.sha256(_bytes_before(file, size)).hexdigest() for file, size in sizes.items()]


def _bytes_before(path: Path, end: int) -> bytes:
    if not end or not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, end - _CHECKED_BYTES))
        return file.read(min(end, _CHECKED_BYTES))
