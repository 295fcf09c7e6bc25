"""A worker's end of the link between the driver's run folder and that of a worker that does not see it.

The worker works in a folder of its own node. A thread of it sends the driver what is new there: events
and logs as they grow, and small files that have changed. It brings back the driver's requests.
Checkpoints do not pass here: each worker uploads its own files (``train.remote.node_store``).

``folder_server`` is the driver's end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import ray

from orchestrator.record.files.reading import whole_line_bytes
from orchestrator.record.files.remote_record import EVENTS
from orchestrator.runtime.failures import cause_of
from orchestrator.runtime.folder_server import (
    DriverEnd,
    FileChange,
    Opened,
    is_growing,
    read_range,
    run_files,
)
from orchestrator.storage.folder import RemoteError
from orchestrator.storage.local_files import replace_file
from orchestrator.types import bytes_text, first_line

_MAIN_SECONDS = 0.1
_OTHERS_SECONDS = 1.0
_CALL_SECONDS = 60.0
_FLUSH_SECONDS = 5.0
_ASK_SECONDS = 0.02
_LAST_SECONDS = 60.0
_MAX_PIECE_BYTES = 2**22
_MAX_FILE_BYTES = 2**26

_logger = logging.getLogger("orchestrator")


class FolderLink:
    """A worker's end of a link, while the block runs."""

    def __init__(self, link: DriverEnd, run_dir: Path, rank: int) -> None:
        """``run_dir`` is the folder that the worker works in."""
        self._server = link.server
        self._run_dir = run_dir
        self._is_main = rank == 0
        self._writer = 0
        self._num_calls = 0
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of each file when it was sent; of a growing file, the bytes sent."""
        self._sizes: dict[str, int] = {}
        """Bytes that growing files have on the driver's disk."""
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
        opened: Opened = ray.get(self._server.open.remote(self._is_main))
        self._writer = opened.writer
        self._sizes |= opened.sizes
        self._write(opened.files)
        self._sent = {name: _file_version(path) for name, path in run_files(self._run_dir)}
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
        self._wait_sent(self._want_flush(), _FLUSH_SECONDS)

    def ask(self, verb: str, subject: str, content: bytes, on_wait: Callable[[], None]) -> None:
        """Send the driver a request, and wait for its answer. Raises ``RemoteError`` if it failed.

        The driver has all that was written before. ``on_wait`` is called meanwhile, and may raise an
        error of its own."""
        flush = self._want_flush()
        while not self._wait_sent(flush, _ASK_SECONDS):
            on_wait()
        answer = self._server.ask.remote(self._writer, verb, subject, content)
        while not ray.wait([answer], timeout=_ASK_SECONDS)[0]:
            on_wait()
        reason = ray.get(answer)
        if reason:
            raise RemoteError(reason)

    def _want_flush(self) -> int:
        """Let the thread exchange at once. Return the number of this flush."""
        with self._changed:
            self._num_wanted += 1
            self._changed.notify_all()
            return self._num_wanted

    def _wait_sent(self, number: int, timeout_s: float) -> bool:
        """Return whether a flush is done, after the timeout at the latest."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_done >= number, timeout_s)

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
        self._is_behind = True
        while self._is_behind:
            self._is_behind = False
            changes = list(self._new_changes())
            self._num_calls += 1
            reply = self._server.exchange.remote(
                self._writer, self._num_calls, [change for change, _ in changes]
            )
            sizes, files = ray.get(reply, timeout=_CALL_SECONDS)
            self._sizes |= sizes
            self._sent |= {change.name: version for change, version in changes}
            self._write(files)

    def _new_changes(self) -> Iterator[tuple[FileChange, tuple[int, int]]]:
        """Yield the changes of files, the events first, with the versions that the driver then has."""
        for name, path in run_files(self._run_dir):
            try:
                change = self._new_bytes(name, path) if is_growing(name) else self._new_content(name, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._leave_behind(name, f"{path} cannot be read, and is not sent to the driver: {error}")
                continue
            if change is not None:
                yield change

    def _new_bytes(self, name: str, path: Path) -> tuple[FileChange, tuple[int, int]] | None:
        """Return the next bytes of a file that grows; of the events, in whole lines at the end."""
        size = whole_line_bytes(path) if name == EVENTS else path.stat().st_size
        sent, _ = self._sent.get(name, (0, 0))
        if size <= sent:
            return None
        data = read_range(path, sent, min(size, sent + _MAX_PIECE_BYTES))
        self._is_behind |= sent + len(data) < size
        return FileChange(name, data, self._sizes.get(name, 0)), (sent + len(data), 0)

    def _new_content(self, name: str, path: Path) -> tuple[FileChange, tuple[int, int]] | None:
        """Return the content of a file that has changed and is small."""
        version = _file_version(path)
        if version[0] > _MAX_FILE_BYTES:
            limit = bytes_text(_MAX_FILE_BYTES)
            self._leave_behind(name, f"{path} has more than {limit}, and is not sent to the driver")
            return None
        if version == self._sent.get(name):
            return None
        return FileChange(name, path.read_bytes()), version

    def _leave_behind(self, name: str, message: str) -> None:
        self._left_behind.add(name)
        self._warn_once(name, message)

    def _warn_once(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            _logger.warning(message)

    def _write(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            if self._received.get(name) != data:
                path = self._run_dir / name
                replace_file(path, data)
                self._received[name] = data
                self._sent[name] = _file_version(path)


def _file_version(path: Path) -> tuple[int, int]:
    """Return size and time of a file; zeros if it is gone."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return 0, 0
