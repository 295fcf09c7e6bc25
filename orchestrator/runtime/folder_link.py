"""A link between the driver's run folder and that of a worker on a node that does not see it.

The worker works in a folder of its own node. A thread of it sends the driver what is new there: events
and logs as they grow, and small files that have changed. It brings back the driver's requests and its
answers. Checkpoints do not pass here: each worker uploads its own files (``train.remote.node_store``).

The driver's side is an actor on the driver's node, which writes into the driver's run folder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.record.events import truncate_torn_line, whole_line_bytes
from orchestrator.record.remote_record import EVENTS
from orchestrator.runtime.failures import cause_of
from orchestrator.runtime.linked_files import (
    append,
    begin_files,
    events_tail,
    file_version,
    piece_end,
    read_range,
    run_files,
    unwritten,
)
from orchestrator.storage.folder import is_safe_name
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.publish_requests import FOLDER as PUBLISH_REQUESTS
from orchestrator.train.remote.publish_requests import answer_names
from orchestrator.types import bytes_text, first_line

_MAIN_SECONDS = 0.1
_OTHERS_SECONDS = 1.0
_CALL_SECONDS = 60.0
_FLUSH_SECONDS = 5.0
_LAST_SECONDS = 60.0
_MAX_PIECE_BYTES = 2**22
_MAX_FILE_BYTES = 2**26
_NUM_THREADS = 8

_logger = logging.getLogger("orchestrator")


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


class FolderLink:
    """A worker's end of a link, while the block runs."""

    def __init__(self, link: Link, run_dir: Path, rank: int) -> None:
        """``run_dir`` is the folder that the worker works in."""
        self._server = link.server
        self._run_dir = run_dir
        self._is_main = rank == 0
        self._writer = 0
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of each file when it was sent; of a growing file, the bytes sent."""
        self._unanswered: list[tuple[Change, tuple[int, int]]] = []
        """Changes that the driver may have or not, with the versions of their files."""
        self._num_changes = 0
        self._is_behind = False
        """Whether a file has more bytes than the last pieces of it."""
        self._received: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._num_wanted = 0
        self._num_done = 0
        self._stopping = False
        self._warned: set[str] = set()
        self._left_behind: set[str] = set()
        """Files that are not sent: their message says why."""
        self._last_error = ""
        """Why the last exchange failed; empty if it did not."""
        self._thread = threading.Thread(target=self._run, name="folder-link", daemon=True)

    def __enter__(self) -> Self:
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._writer, files = ray.get(self._server.open.remote(self._is_main))
        self._write(files)
        self._sent = {name: file_version(path) for name, path in run_files(self._run_dir)}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def is_complete(self) -> bool:
        """Whether the driver has all files, once the block has ended."""
        return not self._last_error and not self._left_behind

    def flush(self) -> None:
        """Wait until the driver has what was written before, at most a few seconds: it may be gone.

        The driver warns of a run that goes on from a snapshot whose events it has not received."""
        with self._changed:
            self._num_wanted += 1
            number = self._num_wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_done >= number, _FLUSH_SECONDS)

    def _run(self) -> None:
        interval_s = _MAIN_SECONDS if self._is_main else _OTHERS_SECONDS
        works = True
        while not self._wait(interval_s, wait_for_flush=works):
            works = self._try_exchange()
        deadline_s = time.monotonic() + _LAST_SECONDS
        while not self._try_exchange():
            if time.monotonic() > deadline_s:
                _logger.warning("the last events and logs did not reach the driver: see %s", self._run_dir)
                return
            time.sleep(interval_s)

    def _wait(self, interval_s: float, wait_for_flush: bool) -> bool:
        """Wait until the next exchange is due. Return whether it is the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or (wait_for_flush and self._num_wanted > self._num_done), interval_s
            )
            return self._stopping

    def _try_exchange(self) -> bool:
        """Exchange once. Return whether the driver has all that was written before."""
        with self._changed:
            number = self._num_wanted
        try:
            self._exchange()
        # The driver's node may not answer for a while; a driver that is gone ends this process.
        except Exception as error:
            self._last_error = first_line(cause_of(error))
            self._warn_once("exchange", f"the driver does not answer, and is asked again: {self._last_error}")
            return False
        self._last_error = ""
        with self._changed:
            self._num_done = number
            self._changed.notify_all()
        return True

    def _exchange(self) -> None:
        """Send what is new, in pieces, and take what the driver has written."""
        has_more = True
        while has_more:
            is_again = bool(self._unanswered)
            if not is_again:
                self._is_behind = False
                self._unanswered = list(self._new_changes())
            changes = self._unanswered
            wanted = answer_names(self._run_dir)
            reply = self._server.exchange.remote(self._writer, [change for change, _ in changes], wanted)
            files: dict[str, bytes] = ray.get(reply, timeout=_CALL_SECONDS)
            self._unanswered = []
            self._sent |= {change.name: version for change, version in changes}
            self._write(files)
            has_more = is_again or self._is_behind

    def _new_changes(self) -> Iterator[tuple[Change, tuple[int, int]]]:
        """Yield the files that have changed: the events first, and last the requests to publish them."""
        for name, path in run_files(self._run_dir):
            try:
                change = self._new_change(name, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._leave_behind(name, f"{path} cannot be read, and is not sent to the driver: {error}")
                continue
            if change is not None:
                yield change

    def _new_change(self, name: str, path: Path) -> tuple[Change, tuple[int, int]] | None:
        """Return what is new in a file, with the version that the driver then has."""
        size, mtime = version = file_version(path)
        sent, _ = sent_version = self._sent.get(name, (0, 0))
        is_growing = name == EVENTS or name.endswith(".log")
        if name == EVENTS:
            size = whole_line_bytes(path)
        if is_growing and size > sent:
            data = read_range(path, sent, piece_end(path, sent, size, _MAX_PIECE_BYTES))
            version = (sent + len(data), mtime)
            self._is_behind |= version[0] < size
        elif not is_growing and size > _MAX_FILE_BYTES:
            limit = bytes_text(_MAX_FILE_BYTES)
            self._leave_behind(name, f"{path} has more than {limit}, and is not sent to the driver")
            return None
        elif not is_growing and version != sent_version:
            data = path.read_bytes()
        else:
            return None
        self._num_changes += 1
        return Change(name, data, is_growing, self._num_changes), version

    def _leave_behind(self, name: str, message: str) -> None:
        self._left_behind.add(name)
        self._warn_once(name, message)

    def _warn_once(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            _logger.warning(message)

    def _write(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            if self._received.get(name) != data:
                path = self._run_dir / name
                replace_file(path, data)
                self._received[name] = data
                self._sent[name] = file_version(path)
