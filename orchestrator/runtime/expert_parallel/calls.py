"""The calls to all members of a group: results, errors, and hosts that are lost or unfit to join."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray

from orchestrator.errors import TrainingFailed
from orchestrator.runtime.expert_parallel.host_pool import HostPool
from orchestrator.runtime.failures import (
    cause_of,
    classify,
    error_for_user,
    lost_host,
    merge_deaths,
)
from orchestrator.runtime.recovery import Failure, LossCause
from orchestrator.train.checkpoint.snapshot_source import ExpertsMissing
from orchestrator.types import first_line


@dataclass
class _Round:
    """One call to each member."""

    pending: dict[Any, int] = field(default_factory=dict)
    """The host id of each call that has not returned."""
    results: dict[int, Any] = field(default_factory=dict)


class GroupCalls:
    """Calls all members of a group at once and collects the results.

    Several rounds of calls may be under way: a host carries out its calls in order."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.members: tuple[int, ...] = ()
        """Host ids in the order of ranks."""
        self._rounds: list[_Round] = []
        self.errors: dict[int, BaseException] = {}
        """The first exception of each member that lives on."""
        self.lost: dict[int, Failure] = {}
        """Members that cannot be used any more."""

    def set_members(self, members: tuple[int, ...]) -> None:
        """Begin a new group."""
        self.members = members
        self.errors = {}
        self.lost = {}

    def rank(self, host_id: int) -> int:
        return self.members.index(host_id)

    def call_all(self, call: Callable[[Any, int, int], Any]) -> None:
        """Start ``call(actor, host_id, rank)`` for each member that is not lost."""
        self._rounds = []
        self.queue_all(call)

    def queue_all(self, call: Callable[[Any, int, int], Any]) -> None:
        """Start another round: each member makes this call when it has done those before."""
        pending = {
            call(self._pool.actor(host_id), host_id, rank): host_id
            for rank, host_id in enumerate(self.members)
            if host_id not in self.lost
        }
        self._rounds.append(_Round(pending))

    @property
    def pending(self) -> dict[Any, int]:
        """The host id of each call that has not returned, oldest calls first."""
        return {call: host_id for each in self._rounds for call, host_id in each.pending.items()}

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    @property
    def round_is_done(self) -> bool:
        """Whether all calls of the oldest round have returned."""
        return not self._rounds or not self._rounds[0].pending

    def end_round(self) -> None:
        """Forget the oldest round. The next one takes its place."""
        self._rounds.pop(0)

    def collect(self) -> None:
        """Take in the calls that have returned."""
        pending = self.pending
        if not pending:
            return
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for each in self._rounds:
            for reference in [call for call in done if call in each.pending]:
                host_id = each.pending.pop(reference)
                try:
                    each.results[host_id] = ray.get(reference)
                except Exception as error:
                    self._add_error(host_id, error)

    def _add_error(self, host_id: int, error: BaseException) -> None:
        failure = classify(error, self.rank(host_id), noun="host")
        match failure.loss:
            case None:
                self.errors.setdefault(host_id, error)
            case "died":
                self.lost[host_id] = failure
            case _:
                self.drop(host_id, "device", f"lost its device: {first_line(cause_of(error))}")

    def drop(self, host_id: int, cause: LossCause, detail: str, frozen: bool = False) -> None:
        """End a member that does not respond or cannot be used. Its call is not waited for."""
        self.lost[host_id] = lost_host(self.rank(host_id), cause, detail)
        for each in self._rounds:
            each.pending = {call: other for call, other in each.pending.items() if other != host_id}
        self._pool.stop(host_id, frozen)

    @property
    def has_failed(self) -> bool:
        return bool(self.errors or self.lost)

    @property
    def main_result(self) -> Any:
        """The main host's result of the oldest round; None until it has returned."""
        return next(iter(self.main_results), None)

    @property
    def main_results(self) -> list[Any]:
        """The main host's result of each round, oldest first; None where it has not returned."""
        return [each.results.get(self.members[0]) for each in self._rounds]

    def failures(self, retry_task_errors: bool) -> tuple[Failure, ...]:
        """Return what went wrong in this group: losses first, then the errors by host id."""
        failures = list(self.lost.values())
        for host_id, error in sorted(self.errors.items()):
            failure = classify(error, self.rank(host_id), noun="host", retry_task_errors=retry_task_errors)
            failures.append(failure)
        return merge_deaths(failures)

    def error_for_user(self, failure: Failure) -> BaseException | None:
        """Return the error to show for a failure; None if no exception of a member belongs to it."""
        raised = {self.rank(host_id): error for host_id, error in self.errors.items()}
        if failure.rank is None or failure.rank not in raised:
            return None
        return error_for_user(raised[failure.rank], failure)


@dataclass(frozen=True)
class UnfitHost:
    """A host that failed by itself while it joined."""

    host_id: int
    reason: str
    error: BaseException
    may_try_again: bool
    """Whether a new process may succeed: this one died or got stuck, and no error says why."""


def find_unfit(calls: GroupCalls, proven: Collection[int]) -> list[UnfitHost]:
    """Return the newcomers that failed by themselves while the group was joining.

    ``proven`` hosts have trained in an earlier group. If no member is left that did not fail by itself,
    the cause is common to all, and none is unfit."""
    # A proven host that is lost was killed, or waited for others in vain: that is no common cause.
    judged = [host_id for host_id in calls.members if host_id not in proven or host_id not in calls.lost]
    found = [_judge(calls, host_id) for host_id in judged]
    failed = [host for host in found if host is not None]
    is_common = len(failed) == len(calls.members)
    return [] if is_common else [host for host in failed if host.host_id not in proven]


def _judge(calls: GroupCalls, host_id: int) -> UnfitHost | None:
    """Return how a host failed; None if it did not, or only waited for others in vain."""
    rank = calls.rank(host_id)
    lost = calls.lost.get(host_id)
    if lost is not None:
        reason = lost.message.removeprefix(f"host {rank} ")
        return UnfitHost(host_id, reason, TrainingFailed(lost.message), lost.loss != "device")
    error = calls.errors.get(host_id)
    if error is None:
        return None
    cause = cause_of(error)
    failure = classify(error, rank, noun="host")
    # A host that was given too few snapshots is fit: the next group gets them all.
    if failure.kind not in ("error", "fault", "memory") or isinstance(cause, ExpertsMissing):
        return None
    return UnfitHost(host_id, failure.message, cause, may_try_again=False)
