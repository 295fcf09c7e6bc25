"""Observes the processes of a run while it goes on: which there are, and how many files and threads
each holds."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

_READ_SECONDS = 0.25
_ALLOWED_MORE = 10.0
"""Files or threads that a process may hold above the usual: store connections are kept for reuse,
and the old group is destroyed in the background."""
_ALLOWED_PER_FAULT = 0.5


@dataclass(frozen=True)
class Reading:
    """The resources of a process at one time."""

    time: float
    files: int
    threads: int
    resident: int


@dataclass(frozen=True)
class Holdings:
    """The last reading of a process, and the number of faults that it lived through."""

    pid: int
    seconds: float
    faults: int
    last: Reading


@dataclass
class ProcessWatch:
    """Reads the processes of a run in a thread.

    ``root`` is the driver. Hosts are found by the run's pid files: in a cluster that was there
    before, they are not children of the driver."""

    root: int
    run_dir: Path
    readings: dict[int, list[Reading]] = field(default_factory=dict)
    member_since: dict[int, float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_READ_SECONDS):
            for pid in self._processes():
                with suppress(OSError, psutil.Error):
                    self.readings.setdefault(pid, []).append(read_process(pid))

    def _processes(self) -> set[int]:
        pids = {self.root}
        with suppress(psutil.Error):
            pids |= {child.pid for child in psutil.Process(self.root).children(recursive=True)}
        for path in self.run_dir.glob("logs/worker_*.pid"):
            with suppress(OSError, ValueError):
                pid = int(path.read_text(encoding="utf-8"))
                pids.add(pid)
                self.member_since.setdefault(pid, time.time())
        return pids

    def holdings(self, fault_times: list[float]) -> list[Holdings]:
        """Return what the driver and each host held at the end; those that lived through most
        faults come first."""
        found: list[Holdings] = []
        for pid, since in {self.root: 0.0, **self.member_since}.items():
            # A process that is exiting has no resident memory; its numbers say nothing.
            readings = [reading for reading in self.readings.get(pid, []) if reading.resident]
            if readings:
                first, last = readings[0], readings[-1]
                faults = sum(since < fault_time < last.time for fault_time in fault_times)
                found.append(Holdings(pid, last.time - first.time, faults, last))
        return sorted(found, key=lambda holdings: -holdings.faults)

    def peak(self, resource: str, driver: bool) -> int:
        """Return the most files, threads or bytes that the driver, or any one host, held at any
        time."""
        pids = {self.root} if driver else self.member_since.keys() - {self.root}
        readings = [reading for pid in pids for reading in self.readings.get(pid, [])]
        return max((getattr(reading, resource) for reading in readings), default=0)


def read_process(pid: int) -> Reading:
    process = psutil.Process(pid)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Reading(time.time(), files, process.num_threads(), process.memory_info().rss)


def find_leaks(watch: ProcessWatch, calm: ProcessWatch, fault_times: list[float]) -> list[str]:
    """Return the processes that hold more files or threads than in the undisturbed run, beyond what
    faults excuse."""
    leaks: list[str] = []
    for holdings in watch.holdings(fault_times):
        driver = holdings.pid == watch.root
        name = "the driver" if driver else f"host process {holdings.pid}"
        allowed_more = _ALLOWED_MORE + _ALLOWED_PER_FAULT * holdings.faults
        for resource in ("files", "threads"):
            usual = calm.peak(resource, driver)
            last = getattr(holdings.last, resource)
            if last - usual > allowed_more:
                after = f"after {holdings.faults} faults"
                leaks.append(f"{name} had {last} {resource} {after}, where {usual} are usual")
    return leaks
