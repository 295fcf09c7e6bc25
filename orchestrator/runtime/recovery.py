"""Decisions after a failure: restart, regroup, wait or give up.

Pure functions: they return values that say what to do and why. The driver and
``expert_parallel/run`` carry them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.types import Choice

FailureKind = Literal["worker", "memory", "resources", "communication", "fault", "error"]

LossCause = Literal["died", "device", "stuck", "unfit"]
"""Why a process is unusable: it died, its GPU failed, it is stuck, or it could not join."""

_BY_SEVERITY: tuple[FailureKind, ...] = (
    "error",
    "memory",
    "worker",
    "fault",
    "resources",
    "communication",
)


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong.

    ``error`` is caused by the run itself (a user's mistake, a loss that diverged) and would happen
    again. A ``fault`` has an unknown cause and may happen again."""

    kind: FailureKind
    message: str
    rank: int | None = None
    micro_batch: int | None = None
    loss: LossCause | None = None
    """Set if the process of that rank cannot be used any more."""


# Decisions


@dataclass(frozen=True)
class Restart:
    """Start new workers from the newest checkpoint."""

    workers: int
    halvings: int
    """How often the micro-batch has been halved so far."""
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """End the run."""

    reason: str
    can_resume: bool = False
    """Whether the user may let the run try again, from its newest checkpoint."""


@dataclass(frozen=True)
class Regroup:
    """Continue with these hosts, in the order of their new ranks."""

    members: tuple[int, ...]
    halvings: int
    reason: str


@dataclass(frozen=True)
class Wait:
    """Wait for a host that is being started."""

    reason: str


PROGRESS_WINDOW = 100
"""Steps of progress after which a failure no longer counts."""


@dataclass(frozen=True)
class FailureHistory:
    """The failures of a run that count towards ``--max-failures``.

    A failure counts until the run is ``PROGRESS_WINDOW`` steps past the furthest step that it had
    reached by then. So a long run survives any number of failures that lie far apart, and one that
    fails at the same step again and again ends."""

    steps: tuple[int, ...] = ()
    """The furthest step that the run had reached at each of the failures that count."""
    halvings: int = 0
    faulty_step: int | None = None
    """The step of the last failure with an unknown cause."""

    @property
    def failures(self) -> int:
        return len(self.steps)

    def with_failure(self, failure: Failure, step: int) -> FailureHistory:
        """Return the history with one more failure, at ``step``, without those that count no more."""
        # A run that fails while it repeats lost steps has made no progress.
        furthest = max(step, *self.steps, 0)
        counted = tuple(earlier for earlier in self.steps if furthest - earlier < PROGRESS_WINDOW)
        return replace(
            self,
            steps=(*counted, furthest),
            halvings=self.halvings + (failure.kind == "memory"),
            faulty_step=step if failure.kind == "fault" else self.faulty_step,
        )


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others; of several equals the first."""
    return min(failures, key=lambda failure: _BY_SEVERITY.index(failure.kind))


def decide_restart(
    failure: Failure, history: FailureHistory, *, max_failures: int, workers: int, slots: int
) -> Restart | GiveUp:
    """Decide how a run goes on whose workers all start anew.

    ``history`` includes the failure; ``slots`` is the number of devices that are available now."""
    give_up = _must_give_up(failure, history.failures, max_failures)
    if give_up is not None:
        return give_up
    if failure.kind == "fault":
        return GiveUp(failure.message)
    if slots < 1:
        return GiveUp(f"{failure.message}; no device is left to continue on")
    if failure.kind == "memory":
        reason = f"{failure.message}; continuing with half the micro-batch"
        return Restart(min(workers, slots), history.halvings, reason)
    if slots < workers:
        reason = f"{failure.message}; continuing on {slots} of {workers} workers with the same global batch"
        return Restart(slots, history.halvings, reason)
    return Restart(workers, history.halvings, failure.message)


def _must_give_up(failure: Failure, failures: int, max_failures: int) -> GiveUp | None:
    if failure.kind == "error":
        return GiveUp(failure.message)
    if failures > max_failures:
        limit = f"--max-failures is {max_failures}"
        if max_failures == 0:
            limit = "no restart is allowed (--max-failures 0)"
        count = "once" if failures == 1 else f"{failures} times within {PROGRESS_WINDOW} steps of progress"
        return GiveUp(
            f"{failure.message}; the run has failed {count}, and {limit}",
            can_resume=True,
        )
    if failure.kind == "memory" and failure.micro_batch == 1:
        return GiveUp(
            f"{failure.message}, which cannot be halved;"
            " try --activation-checkpointing on, more --workers, or a smaller model"
        )
    return None


@dataclass(frozen=True)
class HostStatus:
    """The members of a group by host id, those of them that are lost, and the hosts outside of it.

    ``ready`` hosts can join at once; ``starting`` ones will be ready later."""

    members: tuple[int, ...]
    lost: frozenset[int] = frozenset()
    ready: tuple[int, ...] = ()
    starting: tuple[int, ...] = ()


ExpertGroups = Mapping[int, Choice[int]]
"""For each number of hosts, the groups of hosts that each hold every expert (``--expert-replicas``)."""


def regrouped_experts(groups: ExpertGroups | None, hosts_before: int, hosts: int) -> str:
    """Return the change of the groups with the number of hosts, as the end of a reason; empty without one."""
    if not groups or groups[hosts].value == groups[hosts_before].value:
        return ""
    count = groups[hosts].value
    noun = "1 group" if count == 1 else f"{count} groups"
    return f", and with the experts in {noun} instead of {groups[hosts_before].value}: {groups[hosts].reason}"


def decide_regroup(
    failure: Failure,
    hosts: HostStatus,
    history: FailureHistory,
    *,
    max_failures: int,
    repeated: bool = False,
    may_wait: bool = True,
    groups: ExpertGroups | None = None,
) -> Regroup | Wait | GiveUp:
    """Decide how hosts go on after a failure, which ``history`` includes.

    ``repeated``: an unknown fault has struck at this step before. ``may_wait``: wait for hosts that
    are being started, even if the others could continue without them. ``groups``: those that the hosts
    are divided into."""
    give_up = _must_give_up(failure, history.failures, max_failures)
    if give_up is not None:
        return give_up
    if failure.kind == "fault" and repeated:
        return GiveUp(f"{failure.message}; the same step failed twice")
    members = _replace_lost(hosts)
    num_missing = len(hosts.members) - len(members)
    if num_missing and hosts.starting and (may_wait or not members):
        plural = "s" if num_missing > 1 else ""
        return Wait(f"{failure.message}; waiting for {num_missing} host{plural} to take over")
    if not members:
        return GiveUp(f"{failure.message}; no host is left to continue on")
    reason = failure.message
    if num_missing:
        share = f"{len(members)} of {len(hosts.members)} hosts"
        reason = f"{failure.message}; continuing on {share} with the same global batch"
        reason += regrouped_experts(groups, len(hosts.members), len(members))
    elif failure.kind == "memory":
        reason = f"{failure.message}; continuing with half the micro-batch"
    return Regroup(members, history.halvings, reason)


def _replace_lost(hosts: HostStatus) -> tuple[int, ...]:
    """Return the members, with ready hosts in place of lost ones; ranks without one are dropped."""
    lost = [host for host in hosts.members if host in hosts.lost]
    # The same host id may be ready again: its lost process has been replaced by a new one.
    standby = [host for host in hosts.ready if host not in hosts.members or host in hosts.lost]
    replacements = dict(zip(lost, standby, strict=False))
    survivors = [host for host in hosts.members if host in replacements or host not in hosts.lost]
    return tuple(replacements.get(host, host) for host in survivors)
