"""Who watches a run from outside its loop: the screen, the trackers, and the person at the keyboard."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.config.reader import to_json
from orchestrator.config.settings import Config
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.record.events import EventLog
from orchestrator.record.screen import Screen
from orchestrator.record.trackers import TrackerThread
from orchestrator.redaction import mask_tree


@contextmanager
def open_event_log(config: Config, run_dir: Path, screen: Screen) -> Iterator[EventLog]:
    """The event log with all who read along."""

    def warn(message: str) -> None:
        log.write("warning", kind="tracker", message=message)

    secrets = secret_values()
    shown = mask_tree(to_json(config), secrets)
    trackers = TrackerThread(config.watch.trackers, run_dir, run_dir.name, shown, on_warning=warn)
    log = EventLog(run_dir / "events.jsonl", [screen, trackers], secrets)
    try:
        yield log
    finally:
        with suppress(ValueError):  # after a failure the log is closed already
            trackers.close()
        screen.close()
        log.close()


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM ask the loop to stop at the next step; a second SIGINT stops at once. In a thread other than the
    main one signals are not ours."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, _: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
