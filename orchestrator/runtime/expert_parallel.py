"""Expert parallel: Ray actors that each own a device and host some of the experts. They form their group themselves, and train in
segments of a few seconds; between segments they answer to the driver. When one is lost the others keep their processes: they leave the
group, another takes its place, and all go on from copies of their state in memory."""

from __future__ import annotations

import time
from time import perf_counter
from typing import Any

import ray
from ray.exceptions import RayTaskError

from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.runtime.accounts import Accounts
from orchestrator.runtime.controller import (
    Advance,
    AllClosed,
    AllJoined,
    Apart,
    Broken,
    Close,
    Closing,
    Command,
    Happening,
    HostsReady,
    Join,
    Joining,
    Leave,
    Leaving,
    OutOfTime,
    Over,
    Replace,
    RunEnded,
    SegmentDone,
    Starting,
    State,
    Terms,
    Training,
    Waiting,
    after,
)
from orchestrator.runtime.copies import Copies
from orchestrator.runtime.driving import Ended, failure_of_worker, told_error
from orchestrator.runtime.lodging import Member, Segment, lodger
from orchestrator.runtime.muster import Muster
from orchestrator.runtime.recovery import Failure, Seats, limit_s, stuck, worst
from orchestrator.runtime.seats import SeatPlan
from orchestrator.runtime.vitals import Vitals
from orchestrator.runtime.worker import Assignment
from orchestrator.train.world import open_store

_SEGMENT_SECONDS = 2.0
_FIRST_SEGMENT = 5  # steps, before it is known how long they take
_START_SECONDS = 20.0  # that a host may take to be started anew before the others go on without it
_PAUSE_SECONDS = 0.02


class Hosts:
    """A run on expert hosts, from the first to the last. What happens is told to the controller, and what it says is done."""

    def __init__(self, assignment: Assignment, hosts: int, gpu: bool, log: EventLog) -> None:
        config = assignment.prepared.resolved.config
        self._gpu, self._run_dir = gpu, assignment.run_dir
        self._terms = Terms(hosts, config.parallel.max_failures, grows=config.checkpoint.snapshot_every > 0)
        self._patience = config.parallel.patience(hosts=True)
        self._deadline = perf_counter() + config.parallel.resource_timeout
        self._sent = ray.put(assignment)
        self._store, self._place = open_store(ray.util.get_node_ip_address())
        self._seats = SeatPlan(hosts + config.parallel.spares, gpu, self._sent, self._place)
        self._vitals, self._copies, self._muster = Vitals(self._store), Copies(self._seats), Muster(self._seats)
        self._accounts = Accounts(log, assignment.run_dir)
        self._state: State = Starting()
        self._steps, self._begun, self._since, self._detected = _FIRST_SEGMENT, 0.0, 0.0, 0.0
        self._error: BaseException | None = None
        self._trained = False
        self._failed: tuple[Failure, int, tuple[float, float]] | None = None

    def wait(self, seconds: float) -> Ended | None:
        match self._state:
            case Starting():
                self._start(seconds)
            case Waiting():
                time.sleep(_PAUSE_SECONDS)
                ready, coming = self._seats.look()
                patient = perf_counter() - self._since < _START_SECONDS
                self._tell(HostsReady(ready, self._seats.startable(coming), patient))
            case Over(status=status, failure=failure, given_up=given_up):
                return Ended(status, failure, self._error, given_up)
            case _:
                self._attend(seconds)
        return None

    def close(self) -> None:
        self._accounts.close()
        self._seats.close()

    def _start(self, seconds: float) -> None:
        if self._seats.reserve(seconds):
            ready, coming = self._seats.look()
            self._tell(HostsReady(ready, coming))
            time.sleep(_PAUSE_SECONDS)
        if isinstance(self._state, Starting) and perf_counter() > self._deadline:
            what = "GPUs" if self._gpu else "CPUs"
            self._tell(OutOfTime(f"{self._seats.count} {what} for the hosts of experts were not to be had in time"))

    def _attend(self, seconds: float) -> None:
        """Look after the members: their calls, their copies, their pulses."""
        muster = self._muster
        under_way = [*muster.calls, *self._copies.calls]
        if under_way:
            ray.wait(under_way, num_returns=1, timeout=seconds)
        self._copies.look()
        muster.hear()
        for seat in self._copies.gone - muster.lost.keys():  # who died after its last answer
            muster.give_up(seat, f"host {muster.rank(seat)} was lost")
        self._check_pulses()
        if isinstance(self._state, Leaving):
            if not muster.calls:
                self._all_apart()
        elif muster.broken:
            self._detected = time.time()
            self._tell(Broken())
        elif not muster.calls:
            self._all_answered()

    def _check_pulses(self) -> None:
        """Members that stand still for too long count as lost, and are ended."""
        if not self._vitals.look() or isinstance(self._state, Closing):
            return
        asked = set(self._muster.calls.values())
        vitals = [vital for vital in self._vitals.all() if vital.seat in asked]
        found = stuck(vitals, self._patience, self._vitals.slowest_s)
        if found and all(vital.waiting and vital.silent_s < self._patience for vital in found):
            self._muster.raised[found[0].seat] = RuntimeError("gloo timed out: all hosts wait for each other")
            return
        for vital in found:
            limit = limit_s(vital.phase, self._patience, self._vitals.slowest_s)
            rank = self._muster.rank(vital.seat)
            self._muster.give_up(vital.seat, f"host {rank} was stuck for over {limit:g} s (in phase: {vital.phase})")

    def _all_answered(self) -> None:
        match self._state:
            case Joining():
                self._accounts.restored()
                self._tell(AllJoined())
            case Training(keeping=keeping):
                status, step = self._muster.first
                if keeping and status is None and self._copies.step != step:
                    return  # until all copies of the segment's end are there
                self._accounts.stepped(step)
                self._tell(RunEnded(status) if status is not None else SegmentDone(self._seats.look()[0]))
            case Closing():
                self._tell(AllClosed())
            case _:
                pass

    def _all_apart(self) -> None:
        """Each member has stopped, failed or is lost: it is decided how to go on."""
        self._vitals.look(at_once=True)
        muster, step, joining = self._muster, self._vitals.step, not self._trained
        failures = self._failures(joining)
        failure, failed_at = worst(failures), self._vitals.last_sign(frozenset(muster.lost), self._detected)
        if joining and failure.kind == "fault":  # what was to be restored may be at fault
            self._copies.forget()
        for seat in muster.lost:
            self._seats.end(seat)
        self._since = perf_counter()
        ready, coming = self._seats.look()
        seats = Seats(muster.members, frozenset(muster.lost), ready, (*self._seats.startable(muster.lost), *coming))
        self._error = self._error_of(failure)
        self._failed = failure, step, (failed_at, self._detected)
        self._tell(Apart(failures, seats, step))

    def _failures(self, joining: bool) -> tuple[Failure, ...]:
        muster = self._muster
        lost = [Failure("worker", why, muster.rank(seat)) for seat, why in muster.lost.items()]
        raised = [failure_of_worker(muster.rank(seat), _cause(error), mended=not joining) for seat, error in sorted(muster.raised.items())]
        return (*lost, *raised)

    def _error_of(self, failure: Failure) -> BaseException | None:
        raised = {self._muster.rank(seat): error for seat, error in self._muster.raised.items()}
        told = raised.get(-1 if failure.rank is None else failure.rank)
        return told_error(_cause(told), told, failure) if told is not None else None

    def _tell(self, happening: Happening) -> None:
        self._state, commands = after(self._state, happening, self._terms)
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Replace(seats=seats):
                for seat in sorted(seats):
                    self._seats.start(seat)
            case Join():
                self._join(command)
            case Advance(keep=keep):
                self._advance(keep)
            case Leave(epoch=epoch, members=members):
                for seat in members:
                    if seat not in self._muster.lost:
                        self._seats.actor(seat).leave.remote(epoch)
            case Close():
                self._muster.ask(lambda actor, *_: actor.close.remote())

    def _join(self, command: Join) -> None:
        """Bring the members together: from the copies where there are any, unless a checkpoint is newer."""
        again, before = command.epoch > 0, len(self._muster.members)
        torn = bool(self._muster.members) and self._muster.members[0] in self._muster.lost
        copies = self._copies.references() if again and self._copies.step >= self._saved_step() else ()
        if command.failure is not None:
            assert self._failed is not None
            failure, step, times = self._failed
            self._accounts.failed(failure, command.reason, before, step, times, torn)
        elif again:
            self._accounts.changes(command.reason, before, self._vitals.step, (time.time(), time.time()))
        self._accounts.regrouped(len(command.members), "memory" if copies else "disk")
        self._trained, size = False, len(command.members)
        self._muster.form(command.members)
        self._vitals.follow(command.epoch, command.members)

        def join(actor: Any, seat: int, rank: int) -> Any:
            member = Member(command.epoch, seat, rank, size, self._place, again, command.halvings, copies)
            return actor.join.remote(lodger, command.epoch, self._sent, member)

        self._muster.ask(join)
        self._copies.follow(command.epoch, command.members)

    def _advance(self, keep: bool) -> None:
        """The next segment: one step first after a failure, then what is to be done again, then a few seconds' worth."""
        replay, now = self._accounts.to_replay, perf_counter()
        if self._trained and not replay:
            took = max(1e-3, now - self._begun)
            self._steps = max(1, min(4 * self._steps, round(self._steps * _SEGMENT_SECONDS / took)))
        steps = self._steps if not replay else replay if self._trained else 1
        self._trained, self._begun = True, now
        self._muster.ask(lambda actor, *_: actor.advance.remote(Segment(steps, keep)))

    def _saved_step(self) -> int:
        """The step of the newest checkpoint; -1 where there is none."""
        return max((event["step"] for event in of_kind(read_events(self._run_dir / "events.jsonl"), "checkpoint")), default=-1)


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
