"""Observers of a run in this process: event log, trackers, monitor, profiler, and stop signals."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from orchestrator.config.settings import Config
from orchestrator.config.writer import to_json
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.live.screen.screen import Screen
from orchestrator.live.trackers.trackers import TrackerThread
from orchestrator.plan.inventory.hardware import inventory, secret_values
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog, Listener
from orchestrator.record.files.log import Log
from orchestrator.record.machine.monitor import Monitor, Sample
from orchestrator.record.summary.index import FoldKeeper
from orchestrator.redaction import mask_tree
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.train.group.requests import Requests
from orchestrator.train.group.world import World

_SKIPPED_STEPS = 2
_WARMUP_STEPS = 1
_TRACED_STEPS = 4


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
        log.write(kinds.Warned(kind="tracker", message=message))

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
def monitor_readings(prepared: PreparedRun, world: World, log: Log) -> Iterator[Callable[[], Sample]]:
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

    def newest_reading() -> Sample:
        while warnings:
            log.write(kinds.Warned(kind="memory", message=warnings.popleft()))
        return monitor.newest()

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


@contextmanager
def profiling(run_dir: Path, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Trace a few steps (``--profile``); yield the function to call after each step.

    Writes ``trace.json`` (for chrome://tracing or Perfetto) and ``profile.txt`` to the run folder.
    """
    activities = [ProfilerActivity.CPU]
    sort_by = "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        sort_by = "self_cuda_time_total"

    def write_results(profiler: profile) -> None:
        profiler.export_chrome_trace(str(run_dir / "trace.json"))
        table = profiler.key_averages().table(sort_by=sort_by, row_limit=25)
        (run_dir / "profile.txt").write_text(table, encoding="utf-8")

    with profile(
        activities=activities,
        schedule=schedule(wait=_SKIPPED_STEPS, warmup=_WARMUP_STEPS, active=_TRACED_STEPS, repeat=1),
        on_trace_ready=write_results,
        profile_memory=True,
        record_shapes=True,
    ) as profiler:
        yield lambda step: profiler.step()  # noqa: ARG005
