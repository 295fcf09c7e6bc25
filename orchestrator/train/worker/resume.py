"""The point that a restarted worker resumes from."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.train.checkpoint.snapshots import HostSnapshots


@dataclass(frozen=True)
class PastFailure:
    """The failure that a worker was restarted after. Times are unix seconds."""

    attempt: int
    reason: str
    failed_at: float
    detected_at: float
    workers_before: int
    last_step: int


@dataclass(frozen=True)
class ResumeFrom:
    """The point that a worker of a restarted run resumes from. A run that starts for the first time has none.

    Without snapshots the worker loads the run's newest good checkpoint."""

    snapshots: HostSnapshots = ()
    """The state of all hosts, as the driver kept it in memory."""
    halvings: int = 0
    """How often the micro-batch was halved because a worker ran out of memory."""
    failure: PastFailure | None = None
    """Set where the worker itself records the cost of the recovery."""
