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
_FREE = 10.0  # that anyone may hold more of: ways to the store are kept, and a group that was left is let go of in its own time
_PER_FAULT = 0.5


@dataclass(frozen=True)
class Reading:
    time: float
    files: int
    threads: int
    resident: int


@dataclass(frozen=True)
class Held:
    """What a process held at the end, having lived through so many faults."""

    pid: int
    seconds: float
    faults: int
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
        """Of the driver and of each host; most faults first."""
        since = {self.root: 0.0, **self.member_since}
        lives = {
            pid: [one for one in seen if one.resident] for pid, seen in self.readings.items()
        }  # who is ending has none
        found = [(pid, start, lives[pid]) for pid, start in since.items() if lives.get(pid)]
        held = [
            Held(
                pid,
                seen[-1].time - seen[0].time,
                sum(start < moment < seen[-1].time for moment in moments),
                seen[-1],
            )
            for pid, start, seen in found
        ]
        return sorted(held, key=lambda one: -one.faults)

    def most(self, what: str, driver: bool) -> int:
        """The most files, threads or bytes that the driver, or any one host, held at any time."""
        pids = {self.root} if driver else self.member_since.keys() - {self.root}
        return max((getattr(one, what) for pid in pids for one in self.readings.get(pid, [])), default=0)


def reading(pid: int) -> Reading:
    process = psutil.Process(pid)
    return Reading(
        time.time(), len(os.listdir(f"/proc/{pid}/fd")), process.num_threads(), process.memory_info().rss
    )


def leaking(watch: Watch, calm: Watch, moments: list[float]) -> list[str]:
    """Processes that hold more, of files or threads, than such a process ever did in the run that was left in peace, and than the faults
    it lived through excuse."""
    wrong: list[str] = []
    for one in watch.held(moments):
        driver = one.pid == watch.root
        for what in ("files", "threads"):
            usual, last = calm.most(what, driver), getattr(one.last, what)
            if last - usual > _FREE + _PER_FAULT * one.faults:
                who = "the driver" if driver else f"host process {one.pid}"
                wrong.append(f"{who} had {last} {what} after {one.faults} faults, where {usual} are usual")
    return wrong
