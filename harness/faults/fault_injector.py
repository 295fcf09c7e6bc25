"""Carries out a fault schedule from outside the run, by the run's pid files, its events, and
signals.

Faults inside a step are left to ``faulty_task``; a process that stopped itself there is woken from
here."""

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

from harness.faults.fault_schedule import Fault, FaultFolder, FaultSchedule, FiredFault
from harness.hosts.cluster import RayCluster
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import parse_event

_POLL_SECONDS = 0.005


@dataclass
class EventTail:
    """The events of a run while they are written."""

    path: Path
    events: list[Event] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> list[Event]:
        """Return all events so far. A torn last line waits for its end."""
        if not self.path.exists():
            return self.events
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole_lines)
        parsed = [parse_event(line) for line in whole_lines.split(b"\n")]
        self.events += [event for event in parsed if event is not None]
        return self.events

    def newest_step(self) -> Event | None:
        return next((event for event in reversed(self.events) if event["event"] == "step"), None)

    def first_step(self) -> Event | None:
        return next((event for event in self.events if event["event"] == "step"), None)


def pid_of_rank(run_dir: Path, rank: int) -> int | None:
    """Return the process of a rank, from the run's pid file."""
    with suppress(OSError, ValueError):
        return int((run_dir / "logs" / f"worker_{rank}.pid").read_text(encoding="utf-8"))
    return None


def is_alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def idle_ranks(events: Iterable[Event], hosts: int) -> list[int]:
    """Return the hosts without experts in the newest placement."""
    placements = [event for event in events if event["event"] == "placement"]
    if not placements:
        return []
    busy = {rank for layer in placements[-1]["layers"] for rank in layer["host_of"]}
    return [rank for rank in range(hosts) if rank not in busy]


@dataclass
class FaultInjector:
    """Carries out a schedule in a thread while the run goes on.

    ``roots`` are processes that the run's processes descend from, or whose sessions they belong to.
    No other process is ever sent a signal."""

    run_dir: Path
    schedule: FaultSchedule
    hosts: int
    driver: int
    roots: frozenset[int]
    cluster: RayCluster | None = None
    errors: list[BaseException] = field(default_factory=list)
    _step_seen_at: dict[int, float] = field(default_factory=dict)
    """When the step of a fault was first seen in the record, by the number of the fault."""
    _woken: set[tuple[int, int | None]] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.folder = FaultFolder.of_run(self.run_dir)
        self.tail = EventTail(self.run_dir / "events.jsonl")
        self._thread = threading.Thread(target=self._run, name="injector", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.errors and error[0] is None:
            raise self.errors[0]

    def _run(self) -> None:
        try:
            while not self._stop.wait(_POLL_SECONDS):
                self.carry_out_due()
        except BaseException as error:
            self.errors.append(error)

    def carry_out_due(self) -> None:
        """Carry out the faults that are due now."""
        self.tail.poll()
        fired = self.folder.fired()
        self._wake(fired)
        for number, fault in enumerate(self.schedule.faults):
            waits = number not in self._done and not fault.moment.inside
            if waits and self._is_due(number, fault, fired):
                self._carry_out(number, fault, fired)

    def _is_due(self, number: int, fault: Fault, fired: list[FiredFault]) -> bool:
        moment = fault.moment
        now = time.time()
        if moment.phase == "recovery":
            before = [other.time for other in fired if other.fault == number - 1]
            return bool(before) and now >= max(before) + moment.seconds
        newest = self.tail.newest_step()
        first = self.tail.first_step()
        if newest is None or first is None:
            return False
        if moment.step == 0:
            return now >= first["time"] + moment.seconds
        if number not in self._step_seen_at and newest["step"] >= moment.step:
            self._step_seen_at[number] = now
        return number in self._step_seen_at and now >= self._step_seen_at[number] + moment.seconds

    def _carry_out(self, number: int, fault: Fault, fired: list[FiredFault]) -> None:
        newest = self.tail.newest_step()
        step = newest["step"] if newest else 0
        if fault.kind in ("raylet", "driver"):
            self.folder.claim(number, fault, None, self.driver, step)
            self._done.add(number)
            self._lose(fault)
            return
        victims = self.victims(fault, fired)
        if not victims or not all(self._belongs_to_run(pid) for pid in victims.values()):
            return
        self._done.add(number)
        # All are claimed before the first signal, so that they are hit at once.
        claimed = [pid for rank, pid in victims.items() if self.folder.claim(number, fault, rank, pid, step)]
        for pid in claimed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.kind == "sigkill" else signal.SIGSTOP)

    def victims(self, fault: Fault, fired: list[FiredFault]) -> dict[int, int]:
        """Return the victims' ranks and processes; none as long as one of them is not there yet."""
        pids = {rank: pid_of_rank(self.run_dir, rank) for rank in self._victim_ranks(fault, fired)}
        living = {rank: pid for rank, pid in pids.items() if pid is not None and is_alive(pid)}
        return living if len(living) == len(pids) else {}

    def _victim_ranks(self, fault: Fault, fired: list[FiredFault]) -> list[int]:
        if fault.victim.kind == "ranks":
            return list(fault.victim.ranks)
        if fault.victim.kind == "idle":
            return idle_ranks(self.tail.events, self.hosts)[:1]
        last = next((other for other in reversed(fired) if other.rank is not None), None)
        if last is None or last.rank is None:
            return []
        if fault.victim.kind == "buddy":
            return [(last.rank + 1) % self.hosts]
        # A newcomer: the rank of the last victim, once it has another process.
        return [last.rank] if pid_of_rank(self.run_dir, last.rank) != last.pid else []

    def _belongs_to_run(self, pid: int) -> bool:
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) in self.roots:
                return True
            return bool(self.roots & {parent.pid for parent in psutil.Process(pid).parents()})
        return False

    def _lose(self, fault: Fault) -> None:
        if fault.kind == "driver":
            os.kill(self.driver, signal.SIGKILL)
        elif self.cluster is not None:
            self.cluster.kill_node(len(self.cluster.nodes) - 1)
        else:
            raise ValueError("a raylet can only be killed in a cluster of the test's own; none was given")

    def _wake(self, fired: list[FiredFault]) -> None:
        for fault in fired:
            if fault.fault >= len(self.schedule.faults) or (fault.fault, fault.rank) in self._woken:
                continue
            wakes_after_s = self.schedule.faults[fault.fault].wakes_after_s
            if wakes_after_s is None or time.time() < fault.time + wakes_after_s:
                continue
            self._woken.add((fault.fault, fault.rank))
            if self._belongs_to_run(fault.pid):
                with suppress(ProcessLookupError):
                    os.kill(fault.pid, signal.SIGCONT)
