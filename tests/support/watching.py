"""Looks at the processes of a run while it goes on: who they are, and how many files and threads each holds."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

_LOOK_SECONDS = 0.25
_FREE = 10.0  # that anyone may hold more of: a group that was left is let go of in its own time
_PER_FAULT = 0.5


@dataclass(frozen=True)
class Reading:
    time: float
    files: int
    threads: int
    resident: int


@dataclass(frozen=True)
class Held:
    """What a process held before the second fault that it lived through, when it had been through one, and at the end."""

    pid: int
    seconds: float
    faults: int
    first: Reading
    last: Reading


@dataclass
class Watch:
    """``root`` is the driver. Hosts are known by the run's pid files: on a cluster that runs already they are no children of it."""

    root: int
    run_dir: Path
    readings: dict[int, list[Reading]] = field(default_factory=dict)
    member_since: dict[int, float] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            for pid in self._present():
                with suppress(OSError, psutil.Error):
                    self.readings.setdefault(pid, []).append(reading(pid))

    def _present(self) -> set[int]:
        pids = {self.root}
        with suppress(psutil.Error):
            pids |= {child.pid for child in psutil.Process(self.root).children(recursive=True)}
        for path in self.run_dir.glob("logs/worker_*.pid"):
            with suppress(OSError, ValueError):
                pid = int(path.read_text(encoding="utf-8"))
                pids.add(pid)
                self.member_since.setdefault(pid, time.time())
        return pids

    def held(self, moments: list[float]) -> list[Held]:
        """Of the driver and of each host that lived through two faults or more; most faults first."""
        since = {self.root: 0.0, **self.member_since}
        found = [_held(pid, self.readings.get(pid, []), sorted(moment for moment in moments if moment > since[pid])) for pid in since]
        return sorted((one for one in found if one is not None), key=lambda one: -one.faults)


def _held(pid: int, readings: list[Reading], moments: list[float]) -> Held | None:
    lived = [moment for moment in moments if readings and moment < readings[-1].time]
    before = [one for one in readings if len(lived) > 1 and lived[0] < one.time < lived[1]]
    if not before:
        return None
    return Held(pid, readings[-1].time - readings[0].time, len(lived), before[-1], readings[-1])


def reading(pid: int) -> Reading:
    process = psutil.Process(pid)
    return Reading(time.time(), len(os.listdir(f"/proc/{pid}/fd")), process.num_threads(), process.memory_info().rss)


def leaking(watch: Watch, moments: list[float]) -> list[str]:
    """Processes that hold more with every fault they live through: files or threads."""
    wrong: list[str] = []
    for one in watch.held(moments):
        for name in ("files", "threads"):
            before, after = getattr(one.first, name), getattr(one.last, name)
            if after - before > _FREE + _PER_FAULT * one.faults:
                who = "the driver" if one.pid == watch.root else f"host process {one.pid}"
                wrong.append(f"{who} had {before} {name} after one fault and {after} after {one.faults}")
    return wrong
