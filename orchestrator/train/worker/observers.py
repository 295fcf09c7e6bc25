"""Observers of a run in this process: event log, trackers, monitor, and stop signals."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.config.settings import Config
from orchestrator.config.writer import to_json
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.live.screen.screen import Screen
from orchestrator.live.trackers.trackers import TrackerThread
from orchestrator.plan.inventory.hardware import inventory, secret_values
from orchestrator.record.files.event_log import EventLog, Listener
from orchestrator.record.files.log import Log
from orchestrator.record.machine.monitor import Monitor
from orchestrator.record.summary.index import FoldKeeper
from orchestrator.redaction import mask_tree
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.train.group.requests import Requests
from orchestrator.train.group.world import World


@contextmanager
def open_event_log(
    config: Config,
    run_dir: Path,
    screen: Screen,
    callbacks: CallbackRunner,
    listeners: Iterable[Listener] = (),
) -> Iterator[EventLog]:
    """Yield the event log of a run. Its listeners are screen, trackers, callbacks and ``listeners``."""

    def warn(message: str) -> None:
        log.write("warning", kind="tracker", message=message)

    secrets = secret_values()
    settings = mask_tree(to_json(config), secrets)
    trackers = TrackerThread(
        config.watch.trackers,
        run_dir,
        run_dir.name,
        settings,
        on_warning=warn,
    )
    path = run_dir / "events.jsonl"
    observers = [screen, trackers, callbacks, *listeners, FoldKeeper(path)]
    log = EventLog(path, observers, secrets=secrets)
    callbacks.bind(run_dir, config, log.write)
    try:
        yield log
    finally:
        # After a failure the log is closed already, and a tracker's warning cannot be written.
        with suppress(ValueError):
            trackers.close()
        screen.close()
        log.close()


def with_requests_of(
    callbacks: CallbackRunner, take_others: Callable[[], Requests]
) -> Callable[[], Requests]:
    """Return a function that takes the requests of callbacks in this process, and the other ones."""

    def take() -> Requests:
        callbacks.check()
        others = take_others()
        is_save_asked = callbacks.take_save() or others.save
        return Requests(others.interrupt, others.end or callbacks.stop_reason, is_save_asked)

    return take


@contextmanager
def monitor_readings(prepared: PreparedRun, world: World, log: Log) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function that returns the newest reading of the machine.

    The monitor warns from its own thread, and the log belongs to the loop's thread: warnings are
    queued, and written when a reading is taken."""
    # The plan's inventory may be of another node.
    hardware = prepared.inventory if world.size == 1 else inventory()
    gpus = hardware.gpus if world.device.type == "cuda" else ()
    if world.size == 1:
        gpus = [gpu for gpu in gpus if gpu.index == world.device.index]
    warnings: deque[str] = deque()
    monitor = Monitor(tuple(gpu.uuid or gpu.index for gpu in gpus), on_warning=warnings.append)

    def newest_reading() -> dict[str, Any]:
        while warnings:
            log.write("warning", kind="memory", message=warnings.popleft())
        return monitor.event_fields()

    with monitor:
        yield newest_reading


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGINT or SIGTERM has asked the run to stop.

    A second SIGINT stops at once. Only the main thread may handle signals; in another thread
    they stay as they are."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def handle(number: int, _: FrameType | None) -> None:
        if requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested.set()

    earlier_sigint = signal.signal(signal.SIGINT, handle)
    earlier_sigterm = signal.signal(signal.SIGTERM, handle)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, earlier_sigint)
        signal.signal(signal.SIGTERM, earlier_sigterm)
