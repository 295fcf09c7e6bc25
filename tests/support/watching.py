"""Looks at the processes of a run while it goes on: who they are, and how many files and threads each holds."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

import psutil

_LOOK_SECONDS = 0.25
_SETTLED_SECONDS = 5.0  # of a process's life, before what it holds is counted
_AT_ONCE = 4  # readings that one figure is the median of: a recovery holds more for a moment


@dataclass(frozen=True)
class Reading:
    time: float
    files: int
    threads: int
    resident: int


@dataclass
class Watch:
    """``root`` is the driver. Hosts on a cluster that runs already are no children of it: they are known by the run's pid files."""

    root: int
    run_dir: Path
    readings: dict[int, list[Reading]] = field(default_factory=dict)
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
                pids.add(int(path.read_text(encoding="utf-8")))
        return pids

    def growth(self) -> list[Growth]:
        """Of each process that lived long enough, what it held when it had settled and at the end; longest life first."""
        found = [Growth.of(pid, many) for pid, many in self.readings.items()]
        return sorted((one for one in found if one is not None), key=lambda one: -one.seconds)


@dataclass(frozen=True)
class Growth:
    pid: int
    seconds: float
    began: float
    ended: float
    files: tuple[float, float]
    threads: tuple[float, float]
    resident: tuple[float, float]

    @classmethod
    def of(cls, pid: int, readings: list[Reading]) -> Growth | None:
        settled = [one for one in readings if one.time > readings[0].time + _SETTLED_SECONDS]
        if len(settled) < 2 * _AT_ONCE:
            return None
        first, last = settled[:_AT_ONCE], settled[-_AT_ONCE:]

        def both(name: str) -> tuple[float, float]:
            return median(getattr(one, name) for one in first), median(getattr(one, name) for one in last)

        begun, ended = readings[0].time, readings[-1].time
        return cls(pid, ended - begun, begun, ended, both("files"), both("threads"), both("resident"))

    def lived_through(self, moments: list[float]) -> int:
        """How many of the moments lie within what was measured."""
        return sum(self.began + _SETTLED_SECONDS < moment < self.ended for moment in moments)


def reading(pid: int) -> Reading:
    process = psutil.Process(pid)
    return Reading(time.time(), len(os.listdir(f"/proc/{pid}/fd")), process.num_threads(), process.memory_info().rss)


def leaking(watch: Watch, moments: list[float], spare: float = 6.0) -> list[str]:
    """Processes that hold more with every fault they live through: files or threads. ``spare`` are allowed to anyone."""
    wrong: list[str] = []
    for one in watch.growth():
        lived = one.lived_through(moments)
        for name in ("files", "threads"):
            before, after = getattr(one, name)
            if lived >= 2 and after - before > spare + 0.25 * lived:
                wrong.append(f"process {one.pid} had {before:.0f} {name} and {after:.0f} after {lived} faults")
    return wrong
