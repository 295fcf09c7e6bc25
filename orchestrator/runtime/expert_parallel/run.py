"""Runs with live recovery: Ray actors that each own a device and some of the experts, or a dense model.

The hosts form their group themselves and train in segments of a few seconds. The driver grants
segments ahead, so that no host waits for it, and can change the group at the end of the last one.
When a host is lost, the others keep their processes: they leave the group, another host takes its
rank, and all continue from snapshots of their state in memory.

``ExpertParallelRun`` turns what it observes into events of the state machine in ``states`` and
carries out the commands that it returns."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import ray

from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import OrchestratorError
from orchestrator.plan.host_groups import groups_on
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.runtime.bootstrap import Assignment
from orchestrator.runtime.cluster.prestart import host_variables
from orchestrator.runtime.driver import AttemptResult
from orchestrator.runtime.expert_parallel.calls import find_unfit
from orchestrator.runtime.expert_parallel.group import HostGroup
from orchestrator.runtime.expert_parallel.heartbeats import Heartbeats
from orchestrator.runtime.expert_parallel.host_pool import HostPool
from orchestrator.runtime.expert_parallel.host_worker import Segment, SegmentResult
from orchestrator.runtime.expert_parallel.segments import MAX_GRANTED, SegmentLengths, SnapshotInterval
from orchestrator.runtime.expert_parallel.snapshot_store import SnapshotStore
from orchestrator.runtime.expert_parallel.states import (
    AllClosed,
    AllJoined,
    CloseHosts,
    Closing,
    Command,
    Ended,
    Event,
    FailureSeen,
    GroupStopped,
    HostsReady,
    JoinGroup,
    Joining,
    LeaveGroup,
    Leaving,
    ReplaceHosts,
    RunFinished,
    RunLimits,
    Running,
    RunSegment,
    SegmentDone,
    StartFailed,
    Starting,
    State,
    WaitingForHosts,
    next_state,
)
from orchestrator.runtime.failures import cause_of
from orchestrator.runtime.ray_internals import started_cluster
from orchestrator.runtime.recovery import ExpertGroups, Failure, HostStatus, root_cause
from orchestrator.runtime.recovery_log import FailureTimes, RecoveryLog
from orchestrator.storage.folder import RemoteError
from orchestrator.train.checkpoint.snapshot_source import SnapshotsUnusable
from orchestrator.train.group.stores import LOOPBACK, open_store
from orchestrator.train.remote.node_store import published_steps
from orchestrator.types import first_line

_REPLACEMENT_SECONDS = 20.0
"""How long a new host may take to start before the others go on without it."""
_PAUSE_SECONDS = 0.02
_CLOSING_FACTOR = 6
"""How long hosts may take to close after the end of the run, in time limits of a step."""


@dataclass
class _LastFailure:
    """The last failure of the run."""

    failure: Failure
    step: int
    times: FailureTimes
    recorded: bool = False


def _groups_by_hosts(prepared: PreparedRun, most_hosts: int) -> ExpertGroups | None:
    """Return the expert groups for each number of hosts that the run may have; None without groups.

    The hosts make the same choice when they have joined: it depends on nothing else."""
    plan = prepared.plan
    if plan.expert_replicas.value == 1:
        return None
    config = prepared.resolved.config
    return {hosts: groups_on(config, plan, prepared.facts, hosts) for hosts in range(1, most_hosts + 1)}


class ExpertParallelRun:
    """A run on hosts, through all its groups, from the first start to the end."""

    def __init__(
        self, assignment: Assignment, hosts: int, gpu: bool, log: EventLog, recovery_log: RecoveryLog
    ) -> None:
        config = assignment.prepared.resolved.config
        parallel = config.parallel
        self._gpu = gpu
        self._assignment = assignment
        self._log = log
        self._recovery_log = recovery_log
        snapshots = assignment.prepared.plan.snapshots
        takes_snapshots = snapshots.value != "off"
        self._snapshot_interval = SnapshotInterval(config.checkpoint.snapshot_every if takes_snapshots else 0)
        groups = _groups_by_hosts(assignment.prepared, hosts)
        self._limits = RunLimits(hosts, parallel.max_failures, takes_snapshots, groups)
        self._step_limit_s = parallel.step_timeout_s(hosts=True)
        self._start_limit_s = parallel.resource_timeout
        # On fewer hosts the sums round differently: a deterministic run waits for the replacement.
        self._replacement_limit_s = self._start_limit_s if config.run.deterministic else _REPLACEMENT_SECONDS
        self._start_deadline = perf_counter() + self._start_limit_s
        reference = ray.put(assignment)
        # Nobody but this machine needs to reach the store of a cluster that the run started itself.
        address = LOOPBACK if started_cluster() else ray.util.get_node_ip_address()
        store, store_address = open_store(address, assignment.secret)
        heartbeats = Heartbeats(store, assignment.secret, partial(self._warn, "store"))
        variables = host_variables(config)
        warn_of_hosts = partial(self._warn, "hosts")
        warn_of_snapshots = partial(self._warn, "snapshots")
        self._pool = HostPool(
            hosts + parallel.spares, gpu, reference, store_address, variables, warn_of_hosts
        )
        snapshot_store = SnapshotStore(self._pool, warn_of_snapshots, backups=snapshots.value == "on")
        self._group = HostGroup(
            self._pool, heartbeats, store_address, reference, self._step_limit_s, snapshot_store
        )
        for rejected in snapshots.rejected:
            warn_of_snapshots(f"snapshots are {snapshots.value}: {rejected.why}; {snapshots.reason}")
        self._segments = SegmentLengths()
        self._state: State = Starting()
        self._closing_since = 0.0
        self._stopped_at = 0.0
        self._detected_at = 0.0
        self._last_seen: dict[int, float] = {}
        """The last heartbeat of each host when the failure was detected."""
        self._proven_hosts: tuple[int, ...] = ()
        """Members of the last group that has trained, without those lost since."""
        self._has_trained = False
        self._last_failure: _LastFailure | None = None
        self._error: BaseException | None = None

    def wait(self, timeout_s: float) -> AttemptResult | None:
        """Do what is due. Return the result once the run has ended."""
        match self._state:
            case Starting():
                self._wait_for_start(timeout_s)
            case WaitingForHosts():
                self._wait_for_replacement()
            case Ended(status=status, failure=failure, given_up=given_up):
                return AttemptResult(status, failure, self._error, given_up)
            case _:
                self._attend_group(timeout_s)
        return None

    def close(self) -> None:
        try:
            self._recovery_log.close(time.time())
        finally:
            self._pool.close()

    # Hosts that are being started

    def _wait_for_start(self, timeout_s: float) -> None:
        pool = self._pool
        if pool.reserve(timeout_s):
            ready, starting = pool.poll()
            self._handle(HostsReady(ready, starting))
            time.sleep(_PAUSE_SECONDS)
        if not isinstance(self._state, Starting):
            return
        # A known error, such as a missing run folder, would repeat: no host is started again.
        if isinstance(pool.last_error, OrchestratorError):
            raise pool.last_error
        if pool.size - len(pool.excluded) < self._limits.num_hosts:
            reason = first_line(pool.last_error) if pool.last_error is not None else ""
            message = f"{len(pool.excluded)} of {pool.size} hosts could not be started: {reason}"
            self._handle(StartFailed(f"{message}; see Ray's logs. Is there enough memory?"))
        elif perf_counter() > self._start_deadline:
            devices = f"{pool.size} {'GPUs' if self._gpu else 'CPUs'}"
            limit = f"{self._start_limit_s:g} s (--resource-timeout)"
            self._handle(StartFailed(f"{devices} for the hosts were not available within {limit}"))

    def _wait_for_replacement(self) -> None:
        time.sleep(_PAUSE_SECONDS)
        ready, starting = self._pool.poll()
        waited_s = perf_counter() - self._stopped_at
        startable = self._pool.startable(starting) if waited_s < self._start_limit_s else ()
        self._handle(HostsReady(ready, startable, may_wait=waited_s < self._replacement_limit_s))

    # A group of hosts

    def _attend_group(self, timeout_s: float) -> None:
        """Collect the calls, snapshots and heartbeats of the members, and handle what they show."""
        self._group.poll(
            timeout_s, leaving=isinstance(self._state, Leaving), closing=isinstance(self._state, Closing)
        )
        calls = self._group.calls
        match self._state:
            case Leaving():
                if not calls.pending:
                    self._handle_stopped_group()
            case Closing():
                limit_s = _CLOSING_FACTOR * self._step_limit_s
                if not calls.pending or perf_counter() - self._closing_since > limit_s:
                    self._handle(AllClosed())
            case Running() if (end := self._end_result()) is not None:
                self._handle_end(end)
            case _ if calls.has_failed:
                # Later reads may still find heartbeats of lost hosts: keep the present times.
                self._detected_at = time.time()
                self._last_seen = self._group.heartbeats.last_seen()
                self._handle(FailureSeen())
            case _ if calls.round_is_done:
                self._handle_results()

    def _end_result(self) -> SegmentResult | None:
        """Return the result of the main host that says how the run ended, if there is one."""
        results = (result for result in self._group.calls.main_results if result is not None)
        return next((result for result in results if result.status is not None), None)

    def _handle_end(self, end: SegmentResult) -> None:
        """Finish: the main host has recorded the end of the run.

        The others may return too; a failure of theirs no longer matters."""
        if not self._group.calls.pending or self._group.calls.has_failed:
            assert end.status is not None
            self._recovery_log.stepped(end.step, time.time())
            self._handle(RunFinished(end.status))

    def _handle_results(self) -> None:
        """All members have returned from joining, or from a segment."""
        match self._state:
            case Joining():
                self._group.calls.end_round()
                self._recovery_log.restored(time.time())
                self._handle(AllJoined())
            case Running(snapshot_at_end=snapshot_at_end):
                self._handle_segment(self._group.calls.main_result, snapshot_at_end)
            case _:
                pass

    def _handle_segment(self, result: SegmentResult, snapshot_at_end: bool) -> None:
        """All members have finished the oldest of the granted segments.

        ``snapshot_at_end``: the last of them ends with a snapshot, and the group may change then."""
        calls = self._group.calls
        snapshots = self._group.snapshots
        at_snapshot = snapshot_at_end and calls.num_rounds == 1
        if at_snapshot and snapshots.expects(result.step):
            return  # until the snapshots of the segment's end are complete
        calls.end_round()
        self._segments.finish(result.seconds)
        self._recovery_log.stepped(result.step, time.time())
        self._adapt_snapshots(result)
        if snapshot_at_end and not at_snapshot:
            return
        ready, _ = self._pool.poll(busy=calls.members)
        if at_snapshot and (snapshots.step != result.step or not snapshots.references()):
            ready = ()  # without a complete set no one can join
        self._handle(SegmentDone(ready))

    def _adapt_snapshots(self, result: SegmentResult) -> None:
        """Choose the interval between snapshots again, now that a segment has ended."""
        costs = self._group.snapshots.take_costs()
        chosen = self._snapshot_interval.segment_done(result.step, result.seconds, costs)
        if chosen is not None:
            self._log.write(
                kinds.SnapshotInterval(step=result.step, every=chosen.value, reason=chosen.reason)
            )

    def _handle_stopped_group(self) -> None:
        """Each member has stopped, failed or is lost. Report what happened to the state machine."""
        calls = self._group.calls
        joining = not self._segments.begun
        self._group.heartbeats.read(immediately=True)
        step = self._group.heartbeats.last_step
        if joining:
            # A group that was still joining has made no step of its own.
            step = max(step, self._last_failure.step if self._last_failure is not None else 0)
            self._exclude_unfit_hosts()
        failures = calls.failures(retry_task_errors=not joining)
        failure = root_cause(failures)
        if joining and failure.kind == "fault" and self._cannot_use_snapshots():
            self._group.snapshots.clear()
        seen_at = [self._last_seen.get(host_id, self._detected_at) for host_id in calls.lost]
        times = FailureTimes(max(seen_at, default=self._detected_at), self._detected_at)
        # A host that died by itself is still in the pool, and must not count as ready.
        for host_id in calls.lost:
            self._pool.stop(host_id)
        self._proven_hosts = tuple(host for host in self._proven_hosts if host not in calls.lost)
        self._stopped_at = perf_counter()
        ready, starting = self._pool.poll()
        # Replacements are started by a command that follows; they count as starting already.
        startable = self._pool.startable(calls.lost)
        hosts = HostStatus(calls.members, frozenset(calls.lost), ready, (*startable, *starting))
        self._error = calls.error_for_user(failure)
        self._last_failure = _LastFailure(failure, step, times)
        self._handle(GroupStopped(failures, hosts, step))
        if isinstance(self._state, WaitingForHosts):
            # Waiting may take a while: the failure is shown at once.
            self._record_failure(self._state.reason)

    def _cannot_use_snapshots(self) -> bool:
        """Return whether a host could not read or restore the snapshots themselves.

        After any other fault of a join they are good, and the next generation continues from them."""
        errors = self._group.calls.errors.values()
        return any(isinstance(cause_of(error), SnapshotsUnusable) for error in errors)

    def _exclude_unfit_hosts(self) -> None:
        """Count newcomers that cannot join (a wrong or full GPU, no access to the data) as lost, so
        that the others go on without them."""
        if not self._has_trained:
            return  # a mistake that shows in the first group ends the run
        calls = self._group.calls
        for unfit in find_unfit(calls, self._proven_hosts):
            calls.errors.pop(unfit.host_id, None)
            calls.drop(unfit.host_id, "unfit", f"could not join: {unfit.reason}")
            if unfit.may_try_again:
                self._pool.join_failed(unfit.host_id, unfit.error)
            else:
                self._pool.exclude(unfit.host_id, unfit.error)

    # Commands

    def _handle(self, event: Event) -> None:
        """Advance the state machine and carry out its commands."""
        self._state, commands = next_state(self._state, event, self._limits)
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case ReplaceHosts(host_ids=host_ids):
                for host_id in sorted(host_ids - self._pool.excluded):
                    self._pool.start(host_id)
            case JoinGroup():
                self._join_group(command)
            case RunSegment(snapshot_at_end=snapshot_at_end):
                self._proven_hosts = self._group.calls.members
                self._has_trained = True
                self._pool.joined(self._proven_hosts)
                self._grant_segments(snapshot_at_end)
            case LeaveGroup(generation=generation):
                self._group.leave(generation)
            case CloseHosts():
                self._closing_since = perf_counter()
                self._group.close()

    def _grant_segments(self, snapshot_at_end: bool) -> None:
        """Grant segments ahead, so that the hosts need not wait for the driver.

        Until the steps of a failure are repeated, it is one at a time: the first step says how many
        there are. No segment follows one that ends with a snapshot: the group may change there."""
        steps_to_replay = self._recovery_log.steps_to_replay
        wanted = 1 if steps_to_replay else MAX_GRANTED
        num_missing = 1 if snapshot_at_end else wanted - self._group.calls.num_rounds
        for _ in range(num_missing):
            steps = self._segments.grant(steps_to_replay)
            every = self._snapshot_interval.current.value
            self._group.grant_segment(Segment(steps, snapshot_at_end, every))

    def _join_group(self, command: JoinGroup) -> None:
        """Form the group of a generation. It resumes from the newest good state.

        A checkpoint may be newer than the snapshots, and damaged: the hosts find out when they read it.
        So they get the snapshots in any case."""
        snapshots = self._group.snapshots.references() if command.generation > 0 else ()
        checkpoint_is_newer = bool(snapshots) and self._checkpoint_step() > self._group.snapshots.step
        if command.generation > 0 and not snapshots:
            self._group.snapshots.clear()  # a part of the set is lost
        if command.failure is not None:
            self._record_failure(command.reason)
        elif command.generation > 0:
            now = time.time()
            size_before = len(self._group.calls.members)
            step = self._group.heartbeats.last_step
            self._recovery_log.begin(command.reason, size_before, step, FailureTimes(now, now))
        # As expected; the hosts record what they have read.
        source = "memory" if snapshots and not checkpoint_is_newer else "disk"
        groups = self._limits.groups
        replicas = groups[len(command.members)].value if groups is not None else 1
        self._recovery_log.regrouped(len(command.members), source, time.time(), replicas)
        self._segments.begin_group()
        self._snapshot_interval.begin_group()
        self._group.join(command, snapshots, checkpoint_is_newer)

    def _record_failure(self, reason: str) -> None:
        """Record the last failure once, as soon as it is decided how the run goes on."""
        last = self._last_failure
        assert last is not None
        if last.recorded:
            self._recovery_log.revise(reason)
            return
        num_members = len(self._group.calls.members)
        self._recovery_log.failed(last.failure, reason, num_members, last.step, last.times)
        last.recorded = True

    def _checkpoint_step(self) -> int:
        """Return the step of the newest checkpoint; -1 if there is none."""
        return max(self._saved_steps(), default=-1)

    def _saved_steps(self) -> list[int]:
        link = self._assignment.link
        if link is not None:
            # One failed listing must not count as no checkpoint: the hosts would go on from older
            # snapshots, and unpublish the checkpoint.
            with suppress(RemoteError):
                return published_steps(link.url)
            return []  # the hosts could not read a checkpoint either
        store = CheckpointStore(self._assignment.run_dir / "checkpoints", repair=False)
        return [step for step, _ in store.newest_first()]

    def _warn(self, kind: str, message: str) -> None:
        self._log.write(kinds.Warned(kind=kind, message=message))
