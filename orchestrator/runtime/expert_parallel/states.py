"""The life of a run on hosts, as a pure state machine.

States, events and commands are values; ``next_state`` maps a state and an event to the next state and
the commands to carry out. It knows neither Ray nor torch. ``run`` feeds it events and executes its
commands; nothing else decides how a run goes on after a failure.

    Starting ──▶ Joining ──▶ Running ──▶ Closing ──▶ Ended
                  ▲  │        │        (Running repeats: one segment after the other;
                  │  └──┐  ┌──┘         when more hosts are ready it goes back to Joining)
                  │     ▼  ▼
                  ├──── Leaving ─────────────────▶ Ended
                  │        ▼
                  └── WaitingForHosts ───────────▶ Ended
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.runtime.recovery import (
    ExpertGroups,
    Failure,
    FailureHistory,
    GiveUp,
    HostStatus,
    Regroup,
    Wait,
    decide_regroup,
    regrouped_experts,
    root_cause,
)


@dataclass(frozen=True)
class RunLimits:
    """The settings of a run that the transitions depend on."""

    num_hosts: int
    max_failures: int
    can_grow: bool = True
    """Whether hosts may be added while the run goes on: that needs snapshots to continue from."""
    groups: ExpertGroups | None = None
    """None unless experts are in several groups of hosts."""


# States


@dataclass(frozen=True)
class Starting:
    """Hosts are being started."""


@dataclass(frozen=True)
class Joining:
    """The members form the group of a generation and build or restore their state."""

    generation: int
    members: tuple[int, ...]
    history: FailureHistory = field(default_factory=FailureHistory)


@dataclass(frozen=True)
class Running:
    """The members run the segments that they were granted."""

    generation: int
    members: tuple[int, ...]
    history: FailureHistory = field(default_factory=FailureHistory)
    snapshot_at_end: bool = False
    """Whether the last granted segment ends with a snapshot, from which more hosts can continue."""


@dataclass(frozen=True)
class Leaving:
    """A failure was seen: the members leave the group until each has stopped or is lost."""

    generation: int
    members: tuple[int, ...]
    history: FailureHistory = field(default_factory=FailureHistory)


@dataclass(frozen=True)
class WaitingForHosts:
    """The survivors wait until another host is ready."""

    generation: int
    hosts: HostStatus
    history: FailureHistory
    failure: Failure
    reason: str = ""


@dataclass(frozen=True)
class Closing:
    """The run has finished; the hosts close their work."""

    status: str


@dataclass(frozen=True)
class Ended:
    """The run is over: with a status, or with a failure and the reason to give up."""

    status: str | None = None
    failure: Failure | None = None
    given_up: GiveUp | None = None


State = Starting | Joining | Running | Leaving | WaitingForHosts | Closing | Ended


# Events


@dataclass(frozen=True)
class HostsReady:
    """The hosts that are ready to join, and those that are being started."""

    ready: tuple[int, ...]
    starting: tuple[int, ...] = ()
    may_wait: bool = True
    """Whether there is time left to wait for a host that is being started."""


@dataclass(frozen=True)
class StartFailed:
    """The hosts could not be started."""

    message: str


@dataclass(frozen=True)
class AllJoined:
    """All members have joined the group and hold their state."""


@dataclass(frozen=True)
class SegmentDone:
    """All members have finished a segment; if one was to end with a snapshot, it is that one."""

    ready: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunFinished:
    """The main host has reported how the run ended."""

    status: str


@dataclass(frozen=True)
class AllClosed:
    """The hosts have closed their work."""


@dataclass(frozen=True)
class FailureSeen:
    """A member has failed or is lost."""


@dataclass(frozen=True)
class GroupStopped:
    """Every member has stopped, failed or is lost. ``step`` is the last one that any reached."""

    failures: tuple[Failure, ...]
    hosts: HostStatus
    step: int


Event = (
    HostsReady | StartFailed | AllJoined | SegmentDone | RunFinished | AllClosed | FailureSeen | GroupStopped
)


# Commands


@dataclass(frozen=True)
class JoinGroup:
    """Form the group of a generation. ``members`` are in the order of their ranks."""

    generation: int
    members: tuple[int, ...]
    halvings: int = 0
    failure: Failure | None = None
    """The failure that made a new group necessary, if any."""
    reason: str = ""


@dataclass(frozen=True)
class RunSegment:
    """Grant the next segment. ``snapshot_at_end``: and no more until it has ended."""

    snapshot_at_end: bool = False


@dataclass(frozen=True)
class LeaveGroup:
    """Make the members leave the group of a generation."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class ReplaceHosts:
    """Start a new process for each of these host ids."""

    host_ids: frozenset[int]


@dataclass(frozen=True)
class CloseHosts:
    """Close the work of these hosts."""

    members: tuple[int, ...]


Command = JoinGroup | RunSegment | LeaveGroup | ReplaceHosts | CloseHosts

Transition = tuple[State, tuple[Command, ...]]


def next_state(state: State, event: Event, limits: RunLimits) -> Transition:
    """Return the next state and the commands to carry out.

    An event that a state does not handle changes nothing."""
    match state, event:
        case Starting(), HostsReady(ready=ready) if len(ready) >= limits.num_hosts:
            members = ready[: limits.num_hosts]
            return Joining(0, members), (JoinGroup(0, members),)
        case Starting(), StartFailed(message=message):
            return Ended(failure=Failure("resources", message), given_up=GiveUp(message)), ()
        case Joining(), AllJoined():
            return Running(state.generation, state.members, state.history), (RunSegment(),)
        case Running(members=members), RunFinished(status=status):
            return Closing(status), (CloseHosts(members),)
        case Running(), SegmentDone(ready=ready):
            return _next_segment(state, ready, limits)
        case Joining() | Running(), FailureSeen():
            leaving = Leaving(state.generation, state.members, state.history)
            return leaving, (LeaveGroup(state.generation, state.members),)
        case Leaving(), GroupStopped():
            return _after_failure(state, event, limits)
        case WaitingForHosts(), HostsReady():
            return _after_waiting(state, event, limits)
        case Closing(status=status), AllClosed():
            return Ended(status), ()
        case _:
            return state, ()


def _next_segment(state: Running, ready: tuple[int, ...], limits: RunLimits) -> Transition:
    """Run the next segment, or let more hosts join from a snapshot of the end of this one."""
    num_missing = max(0, limits.num_hosts - len(state.members))
    newcomers = tuple(host for host in ready if host not in state.members)[:num_missing]
    if not newcomers or not limits.can_grow:
        return replace(state, snapshot_at_end=False), (RunSegment(),)
    if not state.snapshot_at_end:
        return replace(state, snapshot_at_end=True), (RunSegment(snapshot_at_end=True),)
    members = (*state.members, *newcomers)
    joining = Joining(state.generation + 1, members, state.history)
    reason = f"{len(members)} hosts instead of {len(state.members)}: more devices are available"
    reason += regrouped_experts(limits.groups, len(state.members), len(members))
    return joining, (JoinGroup(joining.generation, members, state.history.halvings, reason=reason),)


def _after_failure(state: Leaving, stopped: GroupStopped, limits: RunLimits) -> Transition:
    failure = root_cause(stopped.failures)
    # Before this failure is added to the history: a fault repeats if the last one was here too.
    repeated = state.history.faulty_step == stopped.step
    # A newcomer that could not join has cost no step. The pool gives up on it before long.
    history = state.history
    if failure.loss != "unfit":
        history = history.with_failure(failure, stopped.step)
    decision = decide_regroup(
        failure,
        stopped.hosts,
        history,
        max_failures=limits.max_failures,
        repeated=repeated,
        groups=limits.groups,
    )
    if isinstance(decision, GiveUp):
        return Ended(failure=failure, given_up=decision), ()
    # Also if the others go on without the lost hosts: the group grows when they are ready.
    replacing = (ReplaceHosts(stopped.hosts.lost),) if stopped.hosts.lost else ()
    if isinstance(decision, Wait):
        waiting = WaitingForHosts(state.generation, stopped.hosts, history, failure, decision.reason)
        return waiting, replacing
    joining, join = _join_again(state.generation, decision, history, failure)
    return joining, (*replacing, join)


def _after_waiting(state: WaitingForHosts, now: HostsReady, limits: RunLimits) -> Transition:
    hosts = HostStatus(state.hosts.members, state.hosts.lost, now.ready, now.starting)
    decision = decide_regroup(
        state.failure,
        hosts,
        state.history,
        max_failures=limits.max_failures,
        may_wait=now.may_wait,
        groups=limits.groups,
    )
    if isinstance(decision, GiveUp):
        return Ended(failure=state.failure, given_up=decision), ()
    if isinstance(decision, Wait):
        return replace(state, hosts=hosts), ()
    joining, join = _join_again(state.generation, decision, state.history, state.failure)
    return joining, (join,)


def _join_again(
    generation: int, decision: Regroup, history: FailureHistory, failure: Failure
) -> tuple[Joining, JoinGroup]:
    """Return the state and the command of the generation that follows a failure."""
    joining = Joining(generation + 1, decision.members, history)
    join = JoinGroup(joining.generation, decision.members, decision.halvings, failure, decision.reason)
    return joining, join
