"""Trackers read along, and none of them can hold up, or end, the training.

``TrackerThread`` is a listener of the event log. It turns events into named numbers and puts them on one bounded queue per
tracker; a daemon thread behind each queue builds the tracker, feeds it and closes it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.record.events import Event
from orchestrator.record.scalars import scalars
from orchestrator.record.tracker_backends import TrackerFactory, Tracker, find_factories

MOST_ERRORS = 3  # in a row, before a tracker is given up


_STEP_INTERVAL_S = 0.1  # between steps that reach the trackers


class TrackerThread:
    """Feeds trackers from events without ever waiting for one: what a full queue cannot take is dropped and counted.

    ``trackers`` are names, or factories by name. ``on_warning`` is called in the thread that sends events or closes.
    """

    def __init__(
        self,
        trackers: Iterable[str] | Mapping[str, TrackerFactory],
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        on_warning: Callable[[str], None] | None = None,
        *,
        close_timeout_s: float = 10.0,
        queue_size: int = 10_000,
    ) -> None:
        chosen = trackers if isinstance(trackers, Mapping) else find_factories(trackers)
        self._on_warning = on_warning
        self._close_timeout_s = close_timeout_s
        self._warnings: deque[str] = deque()
        self._last_step = 0.0
        self._workers = [
            _Worker(name, factory, queue_size, self._warnings.append) for name, factory in chosen.items()
        ]
        for worker in self._workers:
            worker.start(run_dir, run_name, dict(config))

    @property
    def dropped(self) -> dict[str, int]:
        """Updates that each tracker was too slow for."""
        return {worker.name: worker.dropped for worker in self._workers}

    def __call__(self, event: Event) -> None:
        if event["event"] == "step" and not self._due(event):
            return
        values = scalars(event)
        if values:
            step = int(event.get("step") or 0)
            self._put(lambda tracker: tracker.log(step, values))
        if event["event"] == "start":
            self.text(
                "start", "\n".join(f"{name}: {value}" for name, value in event.items() if name != "event")
            )
        self._deliver_warnings()

    def _due(self, event: Event) -> bool:
        """Short steps are thinned out: a tracker's thread takes the interpreter from the one that trains. The event log
        has them all."""
        now = event.get("time")
        if now is None or not 0 <= now - self._last_step < _STEP_INTERVAL_S:
            self._last_step = now or 0.0
            return True
        return False

    def text(self, name: str, content: str) -> None:
        """Hands all trackers a text: the plan, for instance."""
        self._put(lambda tracker: tracker.text(name, content))

    def close(self) -> None:
        """Waits until all is written, ``close_timeout_s`` in all; a tracker that takes longer is left behind."""
        deadline = time.monotonic() + self._close_timeout_s
        for worker in self._workers:
            worker.ask_to_finish()
        for worker in self._workers:
            worker.finish(deadline)
        self._deliver_warnings()

    def _put(self, action: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.put(action)

    def _deliver_warnings(self) -> None:
        # Not from the tracker's thread: a receiver is likely to write to the event log, which belongs to this one.
        while self._warnings:
            warning = self._warnings.popleft()
            if self._on_warning is not None:
                self._on_warning(warning)


class _Worker:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str, factory: TrackerFactory, queue_size: int, warn: Callable[[str], None]) -> None:
        self.name = name
        self.dropped = 0
        self._factory = factory
        self._warn = warn
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._gone = False  # failed, or left behind: nothing more is put or taken
        self._failed_before = False

    def start(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(run_dir, run_name, config), name=f"tracker-{self.name}", daemon=True
        )
        self._thread.start()

    def put(self, action: Callable[[Tracker], None]) -> None:
        if self._gone or self._closing.is_set():
            return
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self.dropped += 1

    def ask_to_finish(self) -> None:
        self._closing.set()
        with suppress(
            queue.Full
        ):  # a full queue needs no waking: its reader looks at the flag when it has emptied it
            self._queue.put_nowait(None)

    def finish(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._gone:
            self._gone = True
            left = self._queue.qsize()
            self._warn(
                f"the tracker {self.name} did not finish in time and is left behind; about {left} updates may be missing there"
            )
        if self.dropped:
            self._warn(
                f"the tracker {self.name} was too slow: {self.dropped} updates were dropped there; events.jsonl has them all"
            )
            self.dropped = 0

    def _run(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            tracker = self._factory(run_dir, run_name, config)
        except (Exception, SystemExit) as error:
            self._gone = True
            self._warn(
                f"the tracker {self.name} did not start: {_error_text(error)}. Training goes on without it"
            )
            return
        self._feed(tracker)
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._warn(f"the tracker {self.name} did not close well: {_error_text(error)}")

    def _feed(self, tracker: Tracker) -> None:
        errors = 0
        while (action := self._next()) is not None:
            try:
                action(tracker)
                errors = 0
            except (Exception, SystemExit) as error:
                errors += 1
                self._report(error, errors)

    def _next(self) -> Callable[[Tracker], None] | None:
        while not self._gone and not (self._closing.is_set() and self._queue.empty()):
            action = self._queue.get()
            if action is not None:
                return action
        return None

    def _report(self, error: BaseException, errors: int) -> None:
        if errors >= MOST_ERRORS:
            self._gone = True
            self._warn(
                f"the tracker {self.name} failed {errors} times in a row and is switched off: {_error_text(error)}"
            )
        elif not self._failed_before:
            self._failed_before = True
            self._warn(f"the tracker {self.name} failed: {_error_text(error)}. Training goes on")


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
