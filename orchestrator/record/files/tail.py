"""Reader of an event log that other processes write: the driver shows and tracks the events of its workers.

Only whole lines are passed on. The bytes after the last newline are read again next time, so a torn
line waits for its rest, or for the writer that cuts it off (see ``EventLog``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from orchestrator.record.events.kinds import End, Event, JsonEvent, Start, decode_event
from orchestrator.record.files.event_log import Listener
from orchestrator.record.files.growing import GrowingFile, LocalFile, RemoteFile, new_events
from orchestrator.record.files.reading import START, Extent, driver_path, driver_position, merge_events
from orchestrator.storage.folder import RemoteFolder

MAX_BYTES = 2**23
"""Bytes that are read at once: all events of a long run would fill the memory."""

_logger = logging.getLogger("orchestrator")


class Follower:
    """Passes each new event of a growing event log to its listeners, in order.

    The driver's events, which have a file of their own, come where they belong. Call ``poll`` now
    and then, and ``close`` at the end.
    """

    def __init__(
        self,
        path: Path,
        listeners: Iterable[Listener],
        begin: Extent = START,
        *,
        remote: RemoteFolder | None = None,
    ) -> None:
        """``begin``: without the events before, as when a run is resumed.

        ``remote`` is the folder of the log, and ``path`` its name there, if it lies in a remote folder."""
        self._listeners = tuple(listeners)
        self._workers = _growing_file(path, begin.workers, remote)
        self._driver = _growing_file(driver_path(path), begin.driver, remote)
        self._waiting: list[JsonEvent] = []
        """Events of the driver that follow lines of the workers which are not visible yet."""
        self._failed: set[int] = set()
        self._is_behind = False
        """Whether the last read left events of the workers in their file."""
        self._is_closed = False
        self.finished = False
        """Whether the last ``start`` event was followed by an ``end`` event."""

    def poll(self) -> int:
        """Pass on the new events and return their number; a missing file has none yet."""
        if self._is_closed:
            return 0
        num_events = self._poll(is_last=False)
        while self._is_behind:
            num_events += self._poll(is_last=False)
        return num_events

    def close(self) -> None:
        """Pass on the remaining events. The owners of the listeners close them."""
        self.poll()
        if not self._is_closed:
            self._poll(is_last=True)
        self._is_closed = True

    def _poll(self, is_last: bool) -> int:
        # The driver's file first: the lines that its events follow are then in the other one.
        driver_events, _ = new_events(self._driver)
        worker_events, self._is_behind = new_events(self._workers, MAX_BYTES)
        self._waiting += [event for _, event in driver_events]
        due: list[JsonEvent] = []
        while self._waiting and (is_last or driver_position(self._waiting[0]) <= self._workers.offset):
            due.append(self._waiting.pop(0))
        events = merge_events(worker_events, due)
        for content in events:
            event = decode_event(content)
            if event is not None:
                self._pass_on(event)
        return len(events)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, Start | End):
            self.finished = isinstance(event, End)
        for index, listener in enumerate(self._listeners):
            try:
                listener(event)
            except Exception as error:
                # A listener can neither end nor delay the run, nor keep events from the other
                # listeners.
                if index not in self._failed:
                    self._failed.add(index)
                    _logger.warning(
                        "%s could not process the event %r (%s: %s); the run continues",
                        getattr(listener, "__name__", type(listener).__name__),
                        event.EVENT,
                        type(error).__name__,
                        error,
                    )


def _growing_file(path: Path, offset: int, remote: RemoteFolder | None) -> GrowingFile:
    return LocalFile(path, offset) if remote is None else RemoteFile(remote, path.name, offset)
