"""Carries out a schedule on a run from outside: by the pids that the run records, its events, and signals. What must happen inside
a step is left to ``faulty_task``; a process that was stopped there is woken from here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from orchestrator.record.events import Event, parse
from tests.support.cluster import Cluster
from tests.support.faults import Fault, Fired, Post, Schedule

_LOOK_SECONDS = 0.005


@dataclass
class Tail:
    """The events of a run as they are written."""

    path: Path
    events: list[Event] = field(default_factory=list)
    _read: int = 0

    def poll(self) -> list[Event]:
        """All events so far. A torn last line waits for its end; a file that was cut shorter is read on from there."""
        if not self.path.exists():
            return self.events
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.events += [event for line in whole.split(b"\n") if (event := parse(line)) is not None]
        return self.events

    def newest_step(self) -> Event | None:
        return next((event for event in reversed(self.events) if event["event"] == "step"), None)

    def first_step(self) -> Event | None:
        return next((event for event in self.events if event["event"] == "step"), None)


def pid_of(run_dir: Path, rank: int) -> int | None:
    """The process that has a rank now, as the run says."""
    with suppress(OSError, ValueError):
        return int((run_dir / "logs" / f"worker_{rank}.pid").read_text(encoding="utf-8"))
    return None


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def idle_ranks(events: Iterable[Event], hosts: int) -> list[int]:
    """Hosts without experts, by the newest placement."""
    placed = [event for event in events if event["event"] == "placement"]
    if not placed:
        return []
    busy = {rank for layer in placed[-1]["layers"] for rank in layer["host_of"]}
    return [rank for rank in range(hosts) if rank not in busy]


@dataclass
class Injector:
    """Works in a thread of its own while the run goes on. ``roots`` are processes that the run's own descend from, or lead the
    sessions of: nobody else is ever sent a signal."""

    run_dir: Path
    schedule: Schedule
    hosts: int
    driver: int
    roots: frozenset[int]
    cluster: Cluster | None = None
    _since: dict[int, float] = field(default_factory=dict)
    _woken: set[tuple[int, int | None]] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.post, self.tail = Post.beside(self.run_dir), Tail(self.run_dir / "events.jsonl")
        self._thread = threading.Thread(target=self._work, name="injector", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self.errors and error[0] is None:
            raise self.errors[0]

    def _work(self) -> None:
        try:
            while not self._over.wait(_LOOK_SECONDS):
                self.look()
        except BaseException as error:
            self.errors.append(error)

    def look(self) -> None:
        """Do whatever is due now."""
        self.tail.poll()
        fired = self.post.fired()
        self._wake(fired)
        for number, fault in enumerate(self.schedule.faults):
            if number not in self._done and not fault.when.inside and self._is_due(number, fault, fired):
                self._carry_out(number, fault, fired)

    def _is_due(self, number: int, fault: Fault, fired: list[Fired]) -> bool:
        when = fault.when
        if when.phase == "recovery":
            before = [one.time for one in fired if one.fault == number - 1]
            return bool(before) and time.time() >= max(before) + when.seconds
        newest, first = self.tail.newest_step(), self.tail.first_step()
        if newest is None or first is None:
            return False
        if when.step == 0:
            return time.time() >= first["time"] + when.seconds
        if number not in self._since and newest["step"] >= when.step:
            self._since[number] = time.time()
        return number in self._since and time.time() >= self._since[number] + when.seconds

    def _carry_out(self, number: int, fault: Fault, fired: list[Fired]) -> None:
        newest = self.tail.newest_step()
        step = newest["step"] if newest else 0
        if fault.what in ("raylet", "driver"):
            self.post.claim(number, fault, None, self.driver, step)
            self._done.add(number)
            self._lose(fault)
            return
        victims = self.victims(fault, fired)
        if victims and all(self._ours(pid) for pid in victims.values()):
            self._done.add(number)
            claimed = [
                pid for rank, pid in victims.items() if self.post.claim(number, fault, rank, pid, step)
            ]
            for pid in claimed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if fault.what == "sigkill" else signal.SIGSTOP)

    def victims(self, fault: Fault, fired: list[Fired]) -> dict[int, int]:
        """Ranks and their living processes; none as long as any of them is not there yet."""
        last = next((one for one in reversed(fired) if one.rank is not None), None)
        match fault.whom.who:
            case "ranks":
                ranks = list(fault.whom.ranks)
            case "idle":
                ranks = idle_ranks(self.tail.events, self.hosts)[:1]
            case "buddy":
                ranks = [(last.rank + 1) % self.hosts] if last and last.rank is not None else []
            case _:
                ranks = (
                    [last.rank]
                    if last and last.rank is not None and pid_of(self.run_dir, last.rank) != last.pid
                    else []
                )
        found = {
            rank: pid for rank in ranks if (pid := pid_of(self.run_dir, rank)) is not None and alive(pid)
        }
        return found if len(found) == len(ranks) else {}

    def _ours(self, pid: int) -> bool:
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) in self.roots:
                return True
            return bool(self.roots & {parent.pid for parent in psutil.Process(pid).parents()})
        return False

    def _lose(self, fault: Fault) -> None:
        if fault.what == "driver":
            os.kill(self.driver, signal.SIGKILL)
        elif self.cluster is not None:
            self.cluster.kill_node(len(self.cluster.nodes) - 1)
        else:
            raise ValueError("a raylet can be killed where the test has a cluster of its own; none was given")

    def _wake(self, fired: list[Fired]) -> None:
        for one in fired:
            after = (
                self.schedule.faults[one.fault].wakes_after if one.fault < len(self.schedule.faults) else None
            )
            if (
                after is not None
                and (one.fault, one.rank) not in self._woken
                and time.time() >= one.time + after
            ):
                self._woken.add((one.fault, one.rank))
                if self._ours(one.pid):
                    with suppress(ProcessLookupError):
                        os.kill(one.pid, signal.SIGCONT)
