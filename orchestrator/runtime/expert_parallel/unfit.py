"""Hosts that could not join a group that others could: the run goes on without them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.errors import TrainingFailed
from orchestrator.runtime.expert_parallel.calls import GroupCalls
from orchestrator.runtime.failures import cause_of, classify
from orchestrator.train.checkpoint.snapshot_source import ExpertsMissing


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
