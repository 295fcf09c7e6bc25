"""The life of a run on expert hosts as a state machine: states and happenings are values, and so is what is to be done about them.
It knows neither Ray nor torch; ``expert_parallel`` tells it what happened and carries out what it says. Nothing else acts on a failure.

    Starting ──▶ Joining ──▶ Training ──▶ Closing ──▶ Over
                   ▲  │        │  │ ▲
                   │  └─┐  ┌───┘  └─┘ segments; on more hosts again: back to Joining
                   │    ▼  ▼
                Waiting ◀─ Leaving ──▶ Over
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.runtime.recovery import Failure, GiveUp, HostStatus, Tally, Wait, regroup, tallied, worst


@dataclass(frozen=True)
class Terms:
    """What a run asks for."""

    wanted: int
    max_failures: int
    grows: bool = True
    """Whether it can go on on more hosts: there are copies in memory to go on from."""


@dataclass(frozen=True)
class Starting:
    """Hosts are being started; nobody trains yet."""


@dataclass(frozen=True)
class Joining:
    """The members form their group, build or restore, and come to where the run stands."""

    generation: int
    members: tuple[int, ...]
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Training:
    """The members are in a segment. ``keeping``: it ends with a copy, from which more hosts go on."""

    generation: int
    members: tuple[int, ...]
    tally: Tally = field(default_factory=Tally)
    keeping: bool = False


@dataclass(frozen=True)
class Leaving:
    """Something is wrong: members stop, each as soon as it can, until all are accounted for."""

    generation: int
    members: tuple[int, ...]
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Waiting:
    """The survivors stand by until another host is ready."""

    generation: int
    seats: HostStatus
    tally: Tally
    failure: Failure
    reason: str = ""


@dataclass(frozen=True)
class Closing:
    """The run is done; hosts close."""

    status: str


@dataclass(frozen=True)
class Over:
    """Ended: well, with a status, or with a failure that could not be mended."""

    status: str | None = None
    failure: Failure | None = None
    given_up: GiveUp | None = None


State = Starting | Joining | Training | Leaving | Waiting | Closing | Over


@dataclass(frozen=True)
class HostsReady:
    """Hosts that stand by, by their seats, and those that are being started."""

    ready: tuple[int, ...]
    coming: tuple[int, ...] = ()
    patient: bool = True


@dataclass(frozen=True)
class OutOfTime:
    """There were no resources for the hosts."""

    message: str


@dataclass(frozen=True)
class AllJoined:
    pass


@dataclass(frozen=True)
class SegmentDone:
    """All members have done a segment. Where it was to be kept, all copies of its end are there."""

    ready: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunEnded:
    status: str


@dataclass(frozen=True)
class AllClosed:
    pass


@dataclass(frozen=True)
class Broken:
    """The first sign of a failure."""


@dataclass(frozen=True)
class Apart:
    """All members are accounted for: what each failed of, which are lost, the step that was reached, and who may step in."""

    failures: tuple[Failure, ...]
    seats: HostStatus
    step: int
    patient: bool = True


Happening = HostsReady | OutOfTime | AllJoined | SegmentDone | RunEnded | AllClosed | Broken | Apart


@dataclass(frozen=True)
class Join:
    """Form the group of that epoch with these seats, in the order of ranks. ``failure`` is why, if something went wrong."""

    generation: int
    members: tuple[int, ...]
    halvings: int = 0
    failure: Failure | None = None
    reason: str = ""


@dataclass(frozen=True)
class Advance:
    keep: bool = False


@dataclass(frozen=True)
class Leave:
    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Replace:
    """Start a host on each of these seats anew."""

    seats: frozenset[int]


@dataclass(frozen=True)
class Close:
    members: tuple[int, ...]


Command = Join | Advance | Leave | Replace | Close


def after(state: State, happening: Happening, terms: Terms) -> tuple[State, tuple[Command, ...]]:
    """The next state, and what is to be done. What does not concern a state leaves it as it is."""
    match state, happening:
        case Starting(), HostsReady(ready=ready) if len(ready) >= terms.wanted:
            members = ready[: terms.wanted]
            return Joining(0, members), (Join(0, members),)
        case Starting(), OutOfTime(message=message):
            return Over(failure=Failure("resources", message), given_up=GiveUp(message)), ()
        case Joining(generation=epoch, members=members, tally=tally), AllJoined():
            return Training(epoch, members, tally), (Advance(),)
        case Training(members=members), RunEnded(status=status):
            return Closing(status), (Close(members),)
        case Training(), SegmentDone(ready=ready):
            return _next_segment(state, ready, terms)
        case Joining() | Training(), Broken():
            return Leaving(state.generation, state.members, state.tally), (
                Leave(state.generation, state.members),
            )
        case Leaving(), Apart():
            return _after_failure(state, happening, terms)
        case Waiting(), HostsReady():
            return _waited(state, happening, terms)
        case Closing(status=status), AllClosed():
            return Over(status), ()
        case _:
            return state, ()


def _next_segment(state: Training, ready: tuple[int, ...], terms: Terms) -> tuple[State, tuple[Command, ...]]:
    more = tuple(seat for seat in ready if seat not in state.members)[
        : max(0, terms.wanted - len(state.members))
    ]
    if not more or not terms.grows:
        return Training(state.generation, state.members, state.tally), (Advance(),)
    if not state.keeping:
        return Training(state.generation, state.members, state.tally, keeping=True), (Advance(keep=True),)
    members = (*state.members, *more)
    joining = Joining(state.generation + 1, members, state.tally)
    reason = f"{len(members)} hosts instead of {len(state.members)}: there is room again"
    return joining, (Join(joining.generation, members, state.tally.halvings, reason=reason),)


def _after_failure(state: Leaving, apart: Apart, terms: Terms) -> tuple[State, tuple[Command, ...]]:
    failure = worst(apart.failures)
    repeated = state.tally.faulty_step == apart.step
    tally = tallied(state.tally, failure, apart.step)
    choice = regroup(
        failure, apart.seats, tally, max_failures=terms.max_failures, repeated=repeated, patient=apart.patient
    )
    if isinstance(choice, GiveUp):
        return Over(failure=failure, given_up=choice), ()
    anew = (Replace(apart.seats.lost),) if apart.seats.lost else ()
    if isinstance(choice, Wait):
        return Waiting(state.generation, apart.seats, tally, failure, choice.reason), anew
    joining = Joining(state.generation + 1, choice.members, tally)
    return joining, (*anew, Join(joining.generation, choice.members, choice.halvings, failure, choice.reason))


def _waited(state: Waiting, now: HostsReady, terms: Terms) -> tuple[State, tuple[Command, ...]]:
    seats = HostStatus(state.seats.members, state.seats.lost, now.ready, now.coming)
    choice = regroup(state.failure, seats, state.tally, max_failures=terms.max_failures, patient=now.patient)
    match choice:
        case Wait():
            return Waiting(state.generation, seats, state.tally, state.failure, state.reason), ()
        case GiveUp():
            return Over(failure=state.failure, given_up=choice), ()
        case _:
            joining = Joining(state.generation + 1, choice.members, state.tally)
            return joining, (
                Join(joining.generation, choice.members, choice.halvings, state.failure, choice.reason),
            )
