"""The driver's end of the links between its run folder and those of workers that do not see it.

An actor on the driver's node writes the events, logs and small files of the workers into the driver's
run folder, and leaves the requests of the main host there. ``folder_link`` is a worker's end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.record.files.event_log import truncate_torn_line
from orchestrator.record.files.reading import whole_line_bytes
from orchestrator.record.files.remote_record import EVENTS, is_needed
from orchestrator.storage.folder import is_safe_name
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.publish_requests import FOLDER, leave_request, wait_for_answer

_NUM_THREADS = 8
_EVENTS_TAIL_BYTES = 2**20
_MAIN_WRITER = FOLDER / ".main_writer"
"""The number of the last main worker, for a server that is started again."""


@dataclass(frozen=True)
class DriverEnd:
    """The driver's end of the links of a run, as the workers get it."""

    url: str
    """The remote folder of the run."""
    server: Any
    """The actor that writes into the driver's run folder."""


@dataclass(frozen=True)
class FileChange:
    """The new content of a file, or bytes that follow in a file that grows."""

    name: str
    data: bytes
    offset: int | None = None
    """Bytes of the driver's file before these, as the worker knows it; None for a whole file."""


@dataclass(frozen=True)
class Opened:
    """The driver's run folder as a worker begins with it."""

    writer: int
    """The number of the worker."""
    files: Mapping[str, bytes]
    sizes: Mapping[str, int]
    """Bytes of the files that grow."""


def start_server(run_dir: Path, always: Sequence[str]) -> Any:
    """Start the actor on the driver's node. ``always`` are names of files that all workers want."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(FolderServer).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=_NUM_THREADS,
        scheduling_strategy=here,
    )
    return actor.remote(run_dir, tuple(always))


class FolderServer:
    """Writes what the workers send into the driver's run folder.

    It may be killed at any moment and started again: what is sent once more is written once."""

    def __init__(self, run_dir: Path, always: tuple[str, ...]) -> None:
        self._run_dir = run_dir
        self._always = always
        self._main_writer = _saved_number(run_dir / _MAIN_WRITER)
        """The worker whose events count: the last one that opened the record."""
        self._last_calls: dict[int, int] = {}
        """Number of the last exchange, by worker."""
        self._lock = threading.Lock()

    def open(self, is_main: bool) -> Opened:
        """Return what a worker needs to begin."""
        with self._lock:
            # A later worker has a higher number, also where the clock was set back.
            writer = max(time.time_ns(), max(self._last_calls, default=0) + 1, self._main_writer + 1)
            self._last_calls[writer] = 0
            if is_main:
                self._main_writer = writer
                replace_file(self._run_dir / _MAIN_WRITER, str(writer).encode())
                truncate_torn_line(self._run_dir / EVENTS)
            files = {name: path.read_bytes() for name, path in _begin_files(self._run_dir)}
            files[EVENTS] = _events_tail(self._run_dir / EVENTS)
            sizes = {name: path.stat().st_size for name, path in run_files(self._run_dir) if is_growing(name)}
            return Opened(writer, files | self._files_for_all(), sizes)

    def exchange(
        self, writer: int, call: int, changes: Sequence[FileChange]
    ) -> tuple[dict[str, int], dict[str, bytes]]:
        """Write what has changed, in this order. Return sizes of files that grow, and files for all workers.

        ``call`` counts the exchanges of a worker: one that comes after a later one is out of date."""
        with self._lock:
            if call < self._last_calls.get(writer, 0):
                return {}, {}
            self._last_calls[writer] = call
            sizes: dict[str, int] = {}
            for change in changes:
                path = self._run_dir / change.name
                if not is_safe_name(change.name) or (change.name == EVENTS and not self._is_main(writer)):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                if change.offset is None:
                    replace_file(path, change.data)
                else:
                    sizes[change.name] = append_once(path, change.offset, change.data)
            return sizes, self._files_for_all()

    def ask(self, writer: int, verb: str, subject: str, content: bytes) -> str:
        """Return the driver's answer to a request of the main host: why it failed, or nothing."""
        if not is_safe_name(f"{verb}-{subject}"):
            raise ValueError(f"a request cannot have the name {verb}-{subject!r}")
        with self._lock:
            # The next group may have resumed from an earlier checkpoint than the one to publish.
            if not self._is_main(writer):
                return "the group of this main host was left"
            try:
                answer = leave_request(self._run_dir, verb, subject, content)
            except OSError as error:
                return f"the driver cannot write the request: {error}"
        return wait_for_answer(answer)

    def _is_main(self, writer: int) -> bool:
        """Whether a worker is the main one of the last group."""
        return writer == self._main_writer

    def _files_for_all(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in self._always:
            with suppress(FileNotFoundError):
                found[name] = (self._run_dir / name).read_bytes()
        return found


def _saved_number(path: Path) -> int:
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return 0


def is_growing(name: str) -> bool:
    """Whether a file of a run folder only grows."""
    return name == EVENTS or name.endswith(".log")


def run_files(run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of a run folder, without checkpoints and hidden files."""
    for parent, folders, names in os.walk(run_dir):
        base = Path(parent).relative_to(run_dir)
        folders[:] = sorted(name for name in folders if name != "checkpoints" and not name.startswith("."))
        # The events are in the folder itself, which comes before those in it.
        for name in sorted(names, key=lambda name: (name != EVENTS, name)):
            path = Path(parent, name)
            # A socket or a pipe of the user's code has nothing to send.
            if not name.startswith(".") and path.is_file():
                yield (base / name).as_posix(), path


def read_range(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def append_once(path: Path, offset: int, data: bytes) -> int:
    """Append bytes that may be there already, as a whole or in part. Return the size of the file then.

    ``offset`` is where they begin, unless another worker has written to the file since: then they
    follow its bytes. They may be there in part after a kill, or on a full disk. Equal lines that two workers
    write at one place of a log may become one; events have one writer."""
    with path.open("a+b") as file:
        file.seek(offset)
        written = file.read()
        if not written.startswith(data):
            file.write(data[len(written) :] if data.startswith(written) else data)
        return file.seek(0, os.SEEK_END)


def _begin_files(run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield the small files of a run that a worker reads: settings, plan, kept files of the task."""
    for name, path in run_files(run_dir):
        if not name.startswith("events.") and is_needed(name):
            yield name, path
    # By its manifest a task learns that there is a checkpoint.
    for path in run_dir.glob("checkpoints/step_*/manifest.json"):
        yield path.relative_to(run_dir).as_posix(), path


def _events_tail(path: Path) -> bytes:
    """Return the last whole lines of the events."""
    end = whole_line_bytes(path)
    begin = max(0, end - _EVENTS_TAIL_BYTES)
    data = read_range(path, begin, end) if end else b""
    return data.partition(b"\n")[2] if begin else data
