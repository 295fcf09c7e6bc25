"""The cost of each failure, recorded by the driver, which outlives all workers.

Every failure has one ``failure`` event, as soon as it is decided how the run goes on, and one
``recovery`` event, when the lost steps have been repeated:

    failed ──▶ detected ──▶ regrouped ──▶ restored ──▶ first step ──▶ lost steps repeated
      └ detect ─┘└─ regroup ─┘└─ restore ──┘
                                           └──────────── replay ────────────┘
      └───────────────────── total ──────────────────┘

*Regrouped*: the workers of the new group are there. *Restored*: all of them hold their state. Times
are unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event, Start, Step
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import last_recorded_step
from orchestrator.runtime.recovery import Failure


@dataclass(frozen=True)
class FailureTimes:
    """The time of a failure, as near as is known, and the time when the driver noticed it."""

    failed_at: float
    detected_at: float


@dataclass
class Recovery:
    """A recovery that is under way. A time of 0 is not known yet."""

    attempt: int
    reason: str
    workers_before: int
    last_step: int
    """The last step that was done before the failure."""
    failed_at: float
    detected_at: float
    workers: int = 0
    replicas_before: int = 1
    replicas: int = 1
    source: str = "memory"
    resumed_step: int = 0
    regrouped_at: float = 0.0
    restored_at: float = 0.0
    stepped_at: float = 0.0
    """When the first step after the failure was done."""


class RecoveryLog:
    """Writes the ``failure`` and ``recovery`` events of a run."""

    def __init__(self, log: EventLog, run_dir: Path) -> None:
        self._log = log
        self._path = run_dir / "events.jsonl"
        self._current: Recovery | None = None
        self._attempts = 0
        self._replicas = 1
        """Groups of hosts that hold every expert, in the group of workers that trains or forms."""

    def failed(
        self,
        failure: Failure,
        reason: str,
        workers: int,
        step: int,
        times: FailureTimes,
    ) -> None:
        """Record a failure once it is decided how the run goes on (``reason``).

        ``step`` is the last step that the workers reported."""
        # A recorded step was done, even if the last heartbeat is older.
        step = max(step, last_recorded_step(self._path))
        self.begin(reason, workers, step, times)
        self._log.write(
            kinds.Failure(kind=failure.kind, message=reason, rank=failure.rank, step=step, final=False)
        )

    def begin(self, reason: str, workers: int, step: int, times: FailureTimes) -> None:
        """Begin a recovery, or a change of the group without a failure.

        If the recovery before has not reached its first step, its cost becomes part of this one."""
        self._attempts += 1
        if self._current is not None and self._current.stepped_at:
            self.close(times.detected_at)
        unfinished = self._current
        self._current = Recovery(self._attempts, reason, workers, step, times.failed_at, times.detected_at)
        self._current.replicas_before = self._replicas
        if unfinished is not None:
            self._current.replicas_before = unfinished.replicas_before
            self._current.failed_at = unfinished.failed_at
            self._current.last_step = max(unfinished.last_step, step)
            self._current.workers_before = unfinished.workers_before

    def revise(self, reason: str) -> None:
        """Replace the reason: the run goes on in another way than first decided."""
        if self._current is not None:
            self._current.reason = reason

    @property
    def steps_to_replay(self) -> int:
        """The lost steps that remain after the first step; 0 if no recovery is under way."""
        current = self._current
        if current is None:
            return 0
        return max(1, current.last_step - current.resumed_step - 1)

    def regrouped(self, workers: int, source: str, at: float, replicas: int = 1) -> None:
        """The new workers are there. Their state is expected to come from ``memory`` or ``disk``.

        ``replicas`` groups of them hold every expert."""
        self._replicas = replicas
        if self._current is not None:
            self._current.replicas = replicas
            self._current.regrouped_at = at
            self._current.workers = workers
            self._current.source = source

    def resumed(self, source: str) -> None:
        """The new workers have read their state from ``memory`` or ``disk``."""
        if self._current is not None:
            self._current.source = source

    def restored(self, at: float) -> None:
        """All workers hold their state."""
        if self._current is not None:
            self._current.restored_at = at

    def stepped(self, step: int, at: float) -> None:
        """A step has been done. The first call after ``restored`` must be for the first step."""
        current = self._current
        # Steps before the restore belong to the group before.
        if current is None or not current.restored_at:
            return
        if not current.stepped_at:
            current.stepped_at = at
            current.resumed_step = step - 1
        if step >= current.last_step:
            self.close(at)

    def observe(self, event: Event, at: float) -> None:
        """Follow a restart by the events of the new workers. Their state comes from a checkpoint."""
        if isinstance(event, Start):
            self.regrouped(event.workers or 1, "disk", at - (event.build_seconds or 0.0))
            self.restored(at)
        elif isinstance(event, Step):
            self.stepped(event.step, at)

    def close(self, at: float) -> None:
        """Write the ``recovery`` event, if a step has been done: the lost steps are repeated, or
        the repeat ends here."""
        current = self._current
        self._current = None
        if current is None or not current.stepped_at:
            return
        has_replicas = max(current.replicas_before, current.replicas) > 1
        self._log.write(
            kinds.Recovery(
                attempt=current.attempt,
                reason=current.reason,
                workers_before=current.workers_before,
                workers=current.workers,
                expert_replicas_before=current.replicas_before if has_replicas else None,
                expert_replicas=current.replicas if has_replicas else None,
                step=current.resumed_step,
                lost_steps=max(0, current.last_step - current.resumed_step),
                source=current.source,
                detect_seconds=current.detected_at - current.failed_at,
                regroup_seconds=current.regrouped_at - current.detected_at,
                restore_seconds=current.restored_at - current.regrouped_at,
                replay_seconds=at - current.restored_at,
                total_seconds=current.stepped_at - current.failed_at,
            )
        )
