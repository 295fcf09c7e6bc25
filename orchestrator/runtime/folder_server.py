"""The driver's end of the links between its run folder and those of workers that do not see it.

An actor on the driver's node writes what the workers send into the driver's run folder, and gives them
the files that they want of it. ``folder_link`` is a worker's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.record.files.events import truncate_torn_line
from orchestrator.record.files.remote_record import EVENTS
from orchestrator.runtime.linked_files import append, begin_files, events_tail, unwritten
from orchestrator.storage.folder import is_safe_name
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.publish_requests import FOLDER as PUBLISH_REQUESTS

_NUM_THREADS = 8


@dataclass(frozen=True)
class Link:
    """The driver's end of the links of a run, as the workers get it."""

    url: str
    """The remote folder of the run."""
    server: Any
    """The actor that writes into the driver's run folder."""


@dataclass(frozen=True)
class Change:
    """A file that has changed, or bytes to append to it."""

    name: str
    data: bytes
    append: bool
    number: int
    """Counts the changes of a worker: one that is sent again, after a lost reply, is written once."""


def start_server(run_dir: Path, always: Sequence[str]) -> Any:
    """Start the actor on the driver's node. ``always`` are names of files that all workers want."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(FolderServer).options(
        num_cpus=0, max_restarts=-1, max_concurrency=_NUM_THREADS, scheduling_strategy=here
    )
    return actor.remote(run_dir, tuple(always))


class FolderServer:
    """Writes what the workers send into the driver's run folder."""

    def __init__(self, run_dir: Path, always: tuple[str, ...]) -> None:
        self._run_dir = run_dir
        self._always = always
        self._writer = 0
        """The worker whose events count: the last one that opened the record."""
        self._num_written: dict[int, int] = {}
        """Number of the last change that was written, by worker; none of before a restart."""
        self._lock = threading.Lock()

    def open(self, is_main: bool) -> tuple[int, dict[str, bytes]]:
        """Return a number for a worker, and the files of the run that it needs to begin."""
        with self._lock:
            # A later worker has a higher number, also where the clock was set back.
            writer = max(time.time_ns(), max(self._num_written, default=0) + 1)
            self._num_written[writer] = 0
            if is_main:
                self._writer = writer
                truncate_torn_line(self._run_dir / EVENTS)
            files = {name: path.read_bytes() for name, path in begin_files(self._run_dir)}
            files[EVENTS] = events_tail(self._run_dir / EVENTS)
            return writer, files | self._read(self._always)

    def exchange(self, writer: int, changes: Sequence[Change], wanted: Sequence[str]) -> dict[str, bytes]:
        """Write what has changed, in this order. Return the files that the worker wants, if they exist."""
        with self._lock:
            is_known = writer in self._num_written
            num_written = self._num_written.get(writer, 0)
            for change in changes:
                is_new = not is_known or change.number > num_written
                if is_new and is_safe_name(change.name) and self._may_write(writer, change):
                    self._write(change if is_known else self._unwritten(change))
                num_written = max(change.number, num_written)
                if is_known:
                    self._num_written[writer] = num_written
            # Not before: if a write fails, those of a killed server must be looked for again.
            self._num_written[writer] = num_written
            return self._read((*self._always, *wanted))

    def _may_write(self, writer: int, change: Change) -> bool:
        """Whether a change is not of a group that was left, if it is an event or a request to publish.

        The next group writes the events now. It may have resumed from a checkpoint before the one that the
        late request would publish."""
        if change.name != EVENTS and not change.name.startswith(f"{PUBLISH_REQUESTS.as_posix()}/"):
            return True
        # The numbers of workers rise with time: a restarted server learns the last one from its events.
        self._writer = max(writer, self._writer)
        return writer == self._writer

    def _unwritten(self, change: Change) -> Change:
        """Return what a killed server, whose reply was lost, has not written of a change."""
        if not change.append:
            return change
        return replace(change, data=unwritten(self._run_dir / change.name, change.data))

    def _write(self, change: Change) -> None:
        path = self._run_dir / change.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if change.append:
            append(path, change.data)
        else:
            replace_file(path, change.data)

    def _read(self, names: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in filter(is_safe_name, names):
            with suppress(FileNotFoundError):
                found[name] = (self._run_dir / name).read_bytes()
        return found
