"""What each failure cost: when it struck, was noticed, hosts had regrouped, had their state again, made their first step, and had done
again what was lost. One ``failure`` and one ``recovery`` for each, written by the driver: it outlives them all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.record.events import EventLog, last_events, truncate_torn_line, of_kind
from orchestrator.runtime.recovery import Failure


@dataclass
class Recovery:
    """A failure that is being mended. Times are unix seconds."""

    attempt: int
    reason: str
    workers_before: int
    last_step: int
    failed_at: float
    detected_at: float
    workers: int = 0
    source: str = "memory"
    resumed: int = 0
    regrouped_at: float = 0.0
    restored_at: float = 0.0
    stepped_at: float = 0.0


class RecoveryLog:
    """Keeps the accounts of the failure at hand."""

    def __init__(self, log: EventLog, run_dir: Path) -> None:
        self._log, self._path = log, run_dir / "events.jsonl"
        self._open: Recovery | None = None
        self._attempts = 0

    def failed(
        self, failure: Failure, reason: str, workers: int, step: int, times: tuple[float, float], torn: bool
    ) -> None:
        """Something went wrong at a step, and how it goes on is decided. ``times``: it struck and was noticed. ``torn``: who wrote the
        record is lost, perhaps in the middle of a line."""
        if torn:
            truncate_torn_line(self._path)
        recorded = [event.get("step") for event in of_kind(last_events(self._path), "step")[-1:]]
        step = max([step, *(last for last in recorded if isinstance(last, int))])  # a pulse may lag behind
        self.changes(reason, workers, step, times)
        self._log.write(
            "failure", kind=failure.kind, message=reason, rank=failure.rank, step=step, final=False
        )

    def settled(self, reason: str) -> None:
        """How it goes on after all."""
        if self._open is not None:
            self._open.reason = reason

    def changes(self, reason: str, workers: int, step: int, times: tuple[float, float]) -> None:
        """The run is about to go on otherwise. Where the failure before was not mended yet, its costs are part of this one's."""
        self._attempts += 1
        if self._open is not None and self._open.stepped_at:
            self.close()
        before = self._open
        self._open = Recovery(self._attempts, reason, workers, step, *times)
        if before is not None and not before.stepped_at:
            self._open.failed_at, self._open.last_step = before.failed_at, max(before.last_step, step)
            self._open.workers_before = before.workers_before

    @property
    def to_replay(self) -> int:
        """Steps that are still to be done again once the first is done, for the account to be closed; 0 where none is open."""
        trouble = self._open
        return max(1, trouble.last_step - trouble.resumed - 1) if trouble is not None else 0

    def regrouped(self, workers: int, source: str) -> None:
        if self._open is not None:
            self._open.regrouped_at, self._open.workers, self._open.source = time.time(), workers, source

    def restored(self) -> None:
        if self._open is not None:
            self._open.restored_at = time.time()

    def stepped(self, step: int) -> None:
        """A segment is done: the first has one step."""
        trouble = self._open
        if trouble is None:
            return
        if not trouble.stepped_at:
            trouble.stepped_at, trouble.resumed = time.time(), step - 1
        if step >= trouble.last_step:
            self.close()

    def close(self) -> None:
        """Tell what it cost: all was done again, or what was failed anew."""
        trouble, self._open = self._open, None
        if trouble is None or not trouble.stepped_at:
            return
        self._log.write(
            "recovery",
            attempt=trouble.attempt,
            reason=trouble.reason,
            workers_before=trouble.workers_before,
            workers=trouble.workers,
            step=trouble.resumed,
            lost_steps=max(0, trouble.last_step - trouble.resumed),
            source=trouble.source,
            detect_seconds=trouble.detected_at - trouble.failed_at,
            regroup_seconds=trouble.regrouped_at - trouble.detected_at,
            restore_seconds=trouble.restored_at - trouble.regrouped_at,
            replay_seconds=time.time() - trouble.restored_at,
            total_seconds=trouble.stepped_at - trouble.failed_at,
        )
