"""What to do after a failure. Pure: decisions are values, and one place carries them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["worker", "memory", "resources", "communication", "fault", "error"]
_ORDER: tuple[Kind, ...] = ("error", "memory", "worker", "fault", "resources", "communication")


@dataclass(frozen=True)
class Failure:
    """What went wrong. ``error`` is the run's own doing (a user's mistake, a loss that diverged): it would happen again. A ``fault``
    may: nobody knows what it was."""

    kind: Kind
    message: str
    rank: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Again:
    """Begin again from the newest checkpoint."""

    workers: int
    halvings: int
    """How often the micro-batch has been halved by now."""
    reason: str


@dataclass(frozen=True)
class GiveUp:
    reason: str


@dataclass(frozen=True)
class Regroup:
    """Go on with these hosts, by their seats, in the order of their ranks."""

    members: tuple[int, ...]
    halvings: int
    reason: str


@dataclass(frozen=True)
class Wait:
    """For a host that is being started."""

    reason: str


@dataclass(frozen=True)
class Tally:
    """What a run has been through."""

    failures: int = 0
    halvings: int = 0
    faulty_step: int | None = None
    """The step that an unknown fault struck at last."""


def worst(failures: Iterable[Failure]) -> Failure:
    """Of several workers' failures the cause counts, not what it did to the others."""
    return min(failures, key=lambda failure: _ORDER.index(failure.kind))


def decide(
    failure: Failure, *, failures: int, max_failures: int, workers: int, slots: int, halvings: int
) -> Again | GiveUp:
    """After the ``failures``-th failure of a run on ``workers`` workers that all begin again, where ``slots`` are to be had now."""
    end = _hopeless(failure, failures, max_failures)
    if end is not None or failure.kind == "fault":
        return end or GiveUp(failure.message)
    if slots < 1:
        return GiveUp(f"{failure.message}; no device is left to go on with")
    if failure.kind == "memory":
        return Again(min(workers, slots), halvings + 1, f"{failure.message}; going on with half of it")
    if slots < workers:
        return Again(
            slots,
            halvings,
            f"{failure.message}; {slots} of {workers} workers can go on, with the same global batch",
        )
    return Again(workers, halvings, failure.message)


def _hopeless(failure: Failure, failures: int, max_failures: int) -> GiveUp | None:
    if failure.kind == "error":
        return GiveUp(failure.message)
    if failures > max_failures:
        limit = (
            "no restart is allowed (--max-failures 0)"
            if max_failures == 0
            else f"--max-failures is {max_failures}"
        )
        often = "once" if failures == 1 else f"{failures} times"
        return GiveUp(
            f"{failure.message}; the run has failed {often}, and {limit}. Go on from the newest checkpoint with --resume auto"
        )
    if failure.kind == "memory" and failure.micro_batch == 1:
        return GiveUp(
            f"{failure.message}, which cannot be halved; try --activation-checkpointing on, more --workers, or a smaller model"
        )
    return None


def tallied(tally: Tally, failure: Failure, step: int) -> Tally:
    """With one more failure, at that step."""
    halvings = tally.halvings + (failure.kind == "memory")
    return replace(
        tally,
        failures=tally.failures + 1,
        halvings=halvings,
        faulty_step=step if failure.kind == "fault" else tally.faulty_step,
    )


@dataclass(frozen=True)
class HostStatus:
    """The hosts of a group by their seats, those of them that are lost, and others: ready to step in, or being started."""

    members: tuple[int, ...]
    lost: frozenset[int] = frozenset()
    ready: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()


def regroup(
    failure: Failure,
    seats: HostStatus,
    tally: Tally,
    *,
    max_failures: int,
    repeated: bool = False,
    patient: bool = True,
) -> Regroup | Wait | GiveUp:
    """How expert hosts go on after a failure that ``tally`` counts already. ``repeated``: the same step failed before in a way that
    nobody knows. ``patient``: hosts that are being started are worth waiting for, though others could go on without them."""
    end = _hopeless(failure, tally.failures, max_failures)
    if end is not None:
        return end
    if failure.kind == "fault" and repeated:
        return GiveUp(f"{failure.message}; the same step failed twice")
    missing = [seat for seat in seats.members if seat in seats.lost]
    ready = [seat for seat in seats.ready if seat not in seats.members or seat in seats.lost]
    taken = dict(zip(missing, ready, strict=False))
    left = tuple(taken.get(seat, seat) for seat in seats.members if seat in taken or seat not in seats.lost)
    short = len(seats.members) - len(left)
    if short and seats.coming and (patient or not left):
        return Wait(f"{failure.message}; waiting for {short} host{'s' * (short > 1)} to take over")
    if not left:
        return GiveUp(f"{failure.message}; no host is left to go on with")
    if short:
        reason = f"{failure.message}; {len(left)} of {len(seats.members)} hosts can go on, with the same global batch"
        return Regroup(left, tally.halvings, reason)
    half = "; going on with half of it" if failure.kind == "memory" else ""
    return Regroup(left, tally.halvings, failure.message + half)


@dataclass(frozen=True)
class HostHealth:
    """What is known of a host from outside: what it said last, for how long it has said nothing, and for how long nothing new."""

    host_id: int
    phase: str
    waiting: bool
    silent_s: float
    still_s: float


_LIMITS = {
    "step": 1,
    "rest": 1,
    "join": 6,
    "data": 6,
    "snapshot": 6,
    "evaluate": 12,
    "first step": 60,
    "build": 60,
    "save": 60,
}
"""What a phase may take, in multiples of what a step may."""
_SLOW = 3  # times as long as the slowest step so far
_SILENT = 0.95  # of a limit: who says nothing is found out before it is over
_QUIET = 3  # times what a step may take: for so long a host may say nothing at all, busy or not, once it has begun to


def limit_s(phase: str, patience_s: float, slowest_s: float = 0.0) -> float:
    """Seconds that a phase may take without a sign of progress."""
    return max(_LIMITS.get(phase, 1) * patience_s, _SLOW * slowest_s)


def stuck(vitals: Iterable[HostHealth], patience_s: float, slowest_s: float = 0.0) -> tuple[HostHealth, ...]:
    """Hosts that are frozen, out of reach, or at the same thing for too long. Who waits for others is not to blame, unless all do."""
    known = tuple(vitals)
    limits = {vital.host_id: limit_s(vital.phase, patience_s, slowest_s) for vital in known}

    def over(vital: HostHealth) -> bool:
        still = vital.still_s > limits[vital.host_id] and not vital.waiting and vital.phase != "rest"
        quiet = (
            min(limits[vital.host_id], _QUIET * patience_s)
            if vital.phase != "join"
            else limits[vital.host_id]
        )
        return still or vital.silent_s > _SILENT * quiet

    found = tuple(filter(over, known))
    if (
        not found
        and known
        and all(vital.waiting and vital.still_s > limits[vital.host_id] for vital in known)
    ):
        return known
    return found
