"""Expert parallel: Ray actors that each own a device and host some of the experts. They form their group themselves, and train in
segments of a few seconds; between segments they answer to the driver. When one is lost the others keep their processes: they leave the
group, another takes its place, and all go on from copies of their state in memory."""

from __future__ import annotations

import time
from time import perf_counter
from typing import Any

import ray
from ray.exceptions import RayTaskError

from orchestrator.errors import OrchestratorError
from orchestrator.record.events import EventLog
from orchestrator.runtime.bootstrap import Assignment
from orchestrator.runtime.cluster.prestart import for_host
from orchestrator.runtime.driver import Ended, failure_of_worker, told_error
from orchestrator.runtime.expert_parallel.calls import GroupCalls, died
from orchestrator.runtime.expert_parallel.heartbeats import Heartbeats
from orchestrator.runtime.expert_parallel.host_pool import HostPool
from orchestrator.runtime.expert_parallel.host_worker import Member, Segment, host_worker
from orchestrator.runtime.expert_parallel.recovery_log import RecoveryLog
from orchestrator.runtime.expert_parallel.snapshot_store import SnapshotStore
from orchestrator.runtime.expert_parallel.states import (
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
from orchestrator.runtime.recovery import Failure, HostStatus, limit_s, stuck, worst
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.parts.stores import open_store

_SEGMENT_SECONDS = 2.0
_FIRST_SEGMENT = 5  # steps, before it is known how long they take
_START_SECONDS = 20.0  # that a host may take to be started anew before the others go on without it
_PAUSE_SECONDS = 0.02


class ExpertParallelRun:
    """A run on expert hosts, from the first to the last. What happens is told to the controller, and what it says is done."""

    def __init__(self, assignment: Assignment, hosts: int, gpu: bool, log: EventLog) -> None:
        config = assignment.prepared.resolved.config
        self._gpu, self._run_dir = gpu, assignment.run_dir
        self._terms = Terms(hosts, config.parallel.max_failures, grows=config.checkpoint.snapshot_every > 0)
        self._patience = config.parallel.patience(hosts=True)
        self._timeout, self._log = config.parallel.resource_timeout, log
        self._waits = (
            self._timeout if config.run.deterministic else _START_SECONDS
        )  # fewer hosts would round otherwise
        self._deadline = perf_counter() + self._timeout
        self._sent = ray.put(assignment)
        self._store, self._place = open_store(ray.util.get_node_ip_address())
        variables = for_host(config.task) if config.parallel.max_failures else {}
        self._seats = HostPool(hosts + config.parallel.spares, gpu, self._sent, self._place, variables)
        self._vitals, self._muster = Heartbeats(self._store), GroupCalls(self._seats)
        self._copies = SnapshotStore(self._seats, self._warn)
        self._accounts = RecoveryLog(log, assignment.run_dir)
        self._state: State = Starting()
        self._steps, self._begun, self._since, self._detected = _FIRST_SEGMENT, 0.0, 0.0, 0.0
        self._signs: dict[int, float] = {}
        self._error: BaseException | None = None
        self._trained, self._announced = False, False
        self._proven: tuple[int, ...] = ()
        self._failed: tuple[Failure, int, tuple[float, float]] | None = None

    def wait(self, seconds: float) -> Ended | None:
        match self._state:
            case Starting():
                self._start(seconds)
            case Waiting():
                time.sleep(_PAUSE_SECONDS)
                ready, coming = self._seats.look()
                waited = perf_counter() - self._since
                hopeful = self._seats.startable(coming) if waited < self._timeout else ()
                self._tell(HostsReady(ready, hopeful, patient=waited < self._waits))
            case Over(status=status, failure=failure, given_up=given_up):
                return Ended(status, failure, self._error, given_up)
            case _:
                self._attend(seconds)
        return None

    def close(self) -> None:
        try:
            self._accounts.close()
        finally:
            self._seats.close()

    def _start(self, seconds: float) -> None:
        if self._seats.reserve(seconds):
            ready, coming = self._seats.look()
            self._tell(HostsReady(ready, coming))
            time.sleep(_PAUSE_SECONDS)
        if isinstance(self._state, Starting) and isinstance(self._seats.error, OrchestratorError):
            raise self._seats.error
        if (
            isinstance(self._state, Starting)
            and self._seats.count - len(self._seats.given_up) < self._terms.wanted
        ):
            lost = f"{len(self._seats.given_up)} of {self._seats.count} hosts could not be started: {self._seats.complaint}"
            self._tell(OutOfTime(f"{lost}; Ray's logs may tell more. Is there memory enough?"))
        if isinstance(self._state, Starting) and perf_counter() > self._deadline:
            what = "GPUs" if self._gpu else "CPUs"
            self._tell(
                OutOfTime(f"{self._seats.count} {what} for the hosts of experts were not to be had in time")
            )

    def _attend(self, seconds: float) -> None:
        """Look after the members: their calls, their copies, their pulses."""
        muster = self._muster
        under_way = [*muster.calls, *self._copies.calls(all_of_them=not muster.calls)]
        if under_way:
            ray.wait(under_way, num_returns=1, timeout=seconds)
        self._copies.look()
        muster.hear()
        for seat in self._copies.gone - muster.lost.keys():  # who died after its last answer
            muster.give_up(seat, died(muster.rank(seat)))
        self._check_pulses()
        if isinstance(self._state, Leaving):
            if not muster.calls:
                self._all_apart()
        elif isinstance(self._state, Closing):
            if not muster.calls or perf_counter() - self._begun > limit_s("join", self._patience):
                self._tell(AllClosed())
        elif isinstance(self._state, Training) and muster.first is not None and muster.first[0] is not None:
            self._end(muster.first)
        elif muster.broken:
            self._detected, self._signs = (
                time.time(),
                self._vitals.signs(),
            )  # what is read later was said before, too
            self._tell(Broken())
        elif not muster.calls:
            self._all_answered()

    def _end(self, first: tuple[str, int]) -> None:
        """The main host has done all, and recorded it: what happens to the others now changes nothing. They have a moment to end."""
        if not self._muster.calls or self._muster.broken:
            status, step = first
            self._accounts.stepped(step)
            self._tell(RunEnded(status))

    def _check_pulses(self) -> None:
        """Members that stand still for too long count as lost, and are ended."""
        if not self._vitals.look() or isinstance(self._state, Closing):
            return
        asked = set(self._muster.calls.values()) or set(self._muster.members) - self._muster.lost.keys()
        vitals = [vital for vital in self._vitals.all() if vital.host_id in asked]
        found = stuck(vitals, self._patience, self._vitals.slowest_s)
        leaving = isinstance(self._state, Leaving)
        if (
            found
            and not leaving
            and all(vital.waiting and vital.silent_s < self._patience for vital in found)
        ):
            self._muster.raised[found[0].host_id] = RuntimeError(
                "gloo timed out: all hosts wait for each other"
            )
            return
        for vital in found:
            limit = limit_s(vital.phase, self._patience, self._vitals.slowest_s)
            rank = self._muster.rank(vital.host_id)
            self._muster.give_up(
                vital.host_id,
                f"host {rank} was stuck for over {limit:g} s (in phase: {vital.phase})",
                frozen=True,
            )

    def _all_answered(self) -> None:
        match self._state:
            case Joining():
                self._accounts.restored()
                self._tell(AllJoined())
            case Training(keeping=keeping):
                _, step = self._muster.first
                if keeping and self._copies.expects(step):
                    return  # until all copies of the segment's end are there
                self._accounts.stepped(step)
                ready, _ = self._seats.look(busy=self._muster.members)
                kept = not keeping or (self._copies.step == step and bool(self._copies.references()))
                self._tell(SegmentDone(ready if kept else ()))
            case _:
                pass

    def _all_apart(self) -> None:
        """Each member has stopped, failed or is lost: it is decided how to go on."""
        muster, joining = self._muster, not self._trained
        self._vitals.look(at_once=True)
        step = max(
            self._vitals.step, self._failed[1] if joining and self._failed is not None else 0
        )  # who only joins has made none
        if joining:
            self._drop_unfit()
        failures = self._failures(joining)
        failure, failed_at = (
            worst(failures),
            max((self._signs.get(seat, self._detected) for seat in muster.lost), default=self._detected),
        )
        if joining and failure.kind == "fault":  # what was to be restored may be at fault
            self._copies.forget()
        for seat in muster.lost:
            self._seats.end(seat)
        self._proven = tuple(seat for seat in self._proven if seat not in muster.lost)
        self._since = perf_counter()
        ready, coming = self._seats.look()
        seats = HostStatus(
            muster.members, frozenset(muster.lost), ready, (*self._seats.startable(muster.lost), *coming)
        )
        self._error = self._error_of(failure)
        self._failed, self._announced = (failure, step, (failed_at, self._detected)), False
        self._tell(Apart(failures, seats, step))
        if isinstance(self._state, Waiting):  # it may take a while: nobody should wonder meanwhile
            self._announce(self._state.reason)

    def _drop_unfit(self) -> None:
        """A newcomer that cannot join, on a node without the data, say, is lost; those who have trained already are not to blame."""
        for seat, error in list(self._muster.raised.items()):
            rank = self._muster.rank(seat)
            failure = failure_of_worker(rank, _cause(error))
            if self._proven and seat not in self._proven and failure.kind in ("error", "fault"):
                self._muster.raised.pop(seat)
                self._muster.give_up(seat, f"host {rank} could not join: {failure.message}")
                self._seats.rule_out(seat, _cause(error))

    def _failures(self, joining: bool) -> tuple[Failure, ...]:
        muster = self._muster
        dead = sorted(
            muster.rank(seat) for seat, why in muster.lost.items() if why == died(muster.rank(seat))
        )
        lost = [Failure("worker", died(*dead), dead[0])] if dead else []
        lost += [
            Failure("worker", why, muster.rank(seat))
            for seat, why in muster.lost.items()
            if muster.rank(seat) not in dead
        ]
        raised = [
            failure_of_worker(muster.rank(seat), _cause(error), mended=not joining)
            for seat, error in sorted(muster.raised.items())
        ]
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
                for seat in sorted(seats - self._seats.given_up):
                    self._seats.start(seat)
            case Join():
                self._join(command)
            case Advance(keep=keep):
                self._advance(keep)
            case Leave(generation=epoch, members=members):
                for seat in members:
                    if seat not in self._muster.lost:
                        self._seats.actor(seat).leave.remote(epoch)
            case Close():
                self._begun = perf_counter()
                self._muster.ask(lambda actor, *_: actor.close.remote())

    def _join(self, command: Join) -> None:
        """Bring the members together: from the copies where there are any, unless a checkpoint is newer."""
        again, before = command.generation > 0, len(self._muster.members)
        copies = self._copies.references() if again and self._copies.step >= self._saved_step() else ()
        if command.failure is not None:
            self._announce(command.reason)
        elif again:
            self._accounts.changes(command.reason, before, self._vitals.step, (time.time(), time.time()))
        self._accounts.regrouped(len(command.members), "memory" if copies else "disk")
        self._trained, size = False, len(command.members)
        self._muster.form(command.members)
        self._vitals.follow(command.generation, command.members)

        def join(actor: Any, seat: int, rank: int) -> Any:
            member = Member(
                command.generation, seat, rank, size, self._place, again, command.halvings, copies
            )
            return actor.join.remote(host_worker, command.generation, self._sent, member)

        self._muster.ask(join)
        self._copies.follow(command.generation, command.members)

    def _announce(self, reason: str) -> None:
        """Tell what failed and how it goes on, once: as soon as that is decided."""
        assert self._failed is not None
        failure, step, times = self._failed
        if self._announced:
            self._accounts.settled(reason)
        else:
            torn = self._muster.members[0] in self._muster.lost
            self._accounts.failed(failure, reason, len(self._muster.members), step, times, torn)
        self._announced = True

    def _advance(self, keep: bool) -> None:
        """The next segment: one step first after a failure, then what is to be done again, then a few seconds' worth."""
        replay, now = self._accounts.to_replay, perf_counter()
        if self._trained and not replay:
            took = max(1e-3, now - self._begun)
            self._steps = max(1, min(4 * self._steps, round(self._steps * _SEGMENT_SECONDS / took)))
        steps = self._steps if not replay else replay if self._trained else 1
        self._trained, self._begun, self._proven = True, now, self._muster.members
        self._muster.ask(lambda actor, *_: actor.advance.remote(Segment(steps, keep)))

    def _saved_step(self) -> int:
        """The step of the newest checkpoint; -1 where there is none."""
        return max(
            (step for step, _ in CheckpointStore(self._run_dir / "checkpoints", mend=False).newest_first()),
            default=-1,
        )

    def _warn(self, message: str) -> None:
        self._log.write("warning", kind="copies", message=message)


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
