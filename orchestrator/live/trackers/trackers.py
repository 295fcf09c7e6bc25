"""Feeding of experiment trackers, which can neither delay nor end the training.

``TrackerThread`` is a listener of the event log. It turns events into named numbers and puts them
on one bounded queue per tracker; a daemon thread behind each queue builds the tracker, feeds it and
closes it.
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

from orchestrator.live.trackers.tracker_backends import Tracker, TrackerFactory, find_factories
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event, Start, Step


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by the names that trackers show; empty for events without numbers."""
    match event:
        case kinds.Step():
            return _prefixed("train/", _step_values(event))
        case kinds.Evaluation():
            return _prefixed("validation/", {"loss": event.loss} | dict(event.metrics))
        case kinds.Phases():
            return _prefixed("phases/", _fields(event, "steps"))
        case kinds.Exchange():
            values = {f"{name}_per_step": getattr(event, name) for name in ("bytes", "seconds", "rows")}
            return _prefixed("exchange/", values)
        case kinds.Epoch():
            return _prefixed("epoch/", _fields(event, "epoch") | _memory_values(event))
        case kinds.Recovery():
            return _prefixed("recovery/", _fields(event, "attempt"))
        case kinds.Monitor():
            return _prefixed("monitor/", _monitor_values(event))
        case kinds.Load():
            values = {f"layer{index}_imbalance": _imbalance(layer) for index, layer in enumerate(event.loads)}
            return _prefixed("experts/", values)
        case kinds.Logged():
            return _prefixed("callbacks/", event.values)
        case kinds.ExpertChange():
            return _prefixed("experts/", {f"layer{event.layer}_number": event.experts})
        case _:
            return {}


def _step_values(step: kinds.Step) -> dict[str, float | None]:
    rate = step.samples / step.seconds if step.samples and step.seconds else None
    fields = {"loss": step.loss, "grad_norm": step.grad_norm, "learning_rate": step.lr}
    return fields | dict(step.metrics) | {"samples_per_second": rate}


def _memory_values(epoch: kinds.Epoch) -> dict[str, float | None]:
    memory = epoch.memory
    if memory is None:
        return {}
    sizes = {"allocated": memory.allocated, "reserved": memory.reserved} | dict(memory.parts)
    return {f"memory_{name}": value for name, value in sizes.items()}


def _monitor_values(reading: kinds.Monitor) -> dict[str, Any]:
    values = {f"host_{name}": value for name, value in vars(reading.host).items()}
    for device in reading.devices:
        figures = {f"gpu{device.index}_{name}": value for name, value in vars(device).items()}
        values |= {name: value for name, value in figures.items() if not name.endswith(("_index", "_name"))}
    return values


def _imbalance(counts: Iterable[float | None]) -> float | None:
    """Return the tokens of the busiest expert over the mean: 1 is balanced, None without tokens."""
    known = [count or 0.0 for count in counts]
    return max(known) * len(known) / sum(known) if sum(known) else None


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {prefix + name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}


def _fields(event: Event, *excluded: str) -> dict[str, Any]:
    return {name: value for name, value in vars(event).items() if name not in ("time", "step", *excluded)}


MAX_ERRORS = 3  # in a row, before a tracker is switched off
_STEP_INTERVAL_S = 0.1  # between steps that reach the trackers

Action = Callable[[Tracker], None]


class TrackerThread:
    """Feeds trackers from events without waiting for them: updates that a full queue cannot take
    are dropped and counted.

    ``trackers`` are names, or factories by name. ``on_warning`` is called in the thread that sends
    events or closes.
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
        factories = trackers if isinstance(trackers, Mapping) else find_factories(trackers)
        self._on_warning = on_warning
        self._close_timeout_s = close_timeout_s
        self._warnings: deque[str] = deque()
        self._last_step_time = 0.0
        self._workers = [
            _Worker(name, factory, queue_size, self._warnings.append) for name, factory in factories.items()
        ]
        for worker in self._workers:
            worker.start(run_dir, run_name, dict(config))

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped updates by tracker."""
        return {worker.name: worker.dropped for worker in self._workers}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step) and not self._is_due(event.time):
            return
        values = scalars(event)
        if values:
            step = event.step or 0
            self._put(lambda tracker: tracker.log(step, values))
        if isinstance(event, Start):
            facts = [f"{name}: {value}" for name, value in vars(event).items() if value not in (None, ())]
            self.text("start", "\n".join(facts))
        self._deliver_warnings()

    def _is_due(self, now: float | None) -> bool:
        """Return whether a step reaches the trackers.

        Short steps are thinned out, since a tracker's thread takes the interpreter from the
        training thread. The event log has all steps.
        """
        if now is None or not 0 <= now - self._last_step_time < _STEP_INTERVAL_S:
            self._last_step_time = now or 0.0
            return True
        return False

    def text(self, name: str, content: str) -> None:
        """Send a text, such as the plan, to all trackers."""
        self._put(lambda tracker: tracker.text(name, content))

    def close(self) -> None:
        """Wait until all is written, ``close_timeout_s`` in all; a slower tracker is abandoned."""
        deadline = time.monotonic() + self._close_timeout_s
        for worker in self._workers:
            worker.request_finish()
        for worker in self._workers:
            worker.finish(deadline)
        self._deliver_warnings()

    def _put(self, action: Action) -> None:
        for worker in self._workers:
            worker.put(action)

    def _deliver_warnings(self) -> None:
        # Not from the tracker's thread: the receiver probably writes to the event log, which
        # belongs to this thread.
        while self._warnings:
            warning = self._warnings.popleft()
            if self._on_warning is not None:
                self._on_warning(warning)


class _Worker:
    """One tracker, its queue and its thread."""

    def __init__(
        self, name: str, factory: TrackerFactory, queue_size: int, warn: Callable[[str], None]
    ) -> None:
        self.name = name
        self.dropped = 0
        self._factory = factory
        self._warn = warn
        self._queue: queue.Queue[Action | None] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._is_off = False  # failed or abandoned: the queue is neither filled nor emptied
        self._has_failed = False

    def start(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(run_dir, run_name, config), name=f"tracker-{self.name}", daemon=True
        )
        self._thread.start()

    def put(self, action: Action) -> None:
        if self._is_off or self._closing.is_set():
            return
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self.dropped += 1

    def request_finish(self) -> None:
        self._closing.set()
        # None wakes a thread that waits. The thread behind a full queue sees the flag once the
        # queue is empty.
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def finish(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._is_off:
            self._is_off = True
            self._warn(
                f"the tracker {self.name} did not finish in time and is abandoned; "
                f"about {self._queue.qsize()} updates may be missing there"
            )
        if self.dropped:
            self._warn(
                f"the tracker {self.name} was too slow: {self.dropped} updates were dropped there; "
                "events.jsonl has them all"
            )
            self.dropped = 0

    def _run(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            tracker = self._factory(run_dir, run_name, config)
        except (Exception, SystemExit) as error:
            self._is_off = True
            self._warn(
                f"the tracker {self.name} did not start: {_error_text(error)}. Training continues without it"
            )
            return
        self._feed(tracker)
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._warn(f"the tracker {self.name} did not close properly: {_error_text(error)}")

    def _feed(self, tracker: Tracker) -> None:
        num_errors = 0
        while (action := self._next()) is not None:
            try:
                action(tracker)
                num_errors = 0
            except (Exception, SystemExit) as error:
                num_errors += 1
                self._report(error, num_errors)

    def _next(self) -> Action | None:
        while not self._is_off and not (self._closing.is_set() and self._queue.empty()):
            action = self._queue.get()
            if action is not None:
                return action
        return None

    def _report(self, error: BaseException, num_errors: int) -> None:
        if num_errors >= MAX_ERRORS:
            self._is_off = True
            self._warn(
                f"the tracker {self.name} failed {num_errors} times in a row and is switched off: "
                f"{_error_text(error)}"
            )
        elif not self._has_failed:
            self._has_failed = True
            self._warn(f"the tracker {self.name} failed: {_error_text(error)}. Training continues")


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
