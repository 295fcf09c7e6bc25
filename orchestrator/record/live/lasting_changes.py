"""The number of lasting changes of experts while a run goes on, as its summary will have it."""

from __future__ import annotations

from collections import Counter

from orchestrator.record.events.kinds import ExpertChange
from orchestrator.record.experts.expert_changes import KINDS, change_counts

MAX_RECENT = 1000
"""Changes that a restart may still discard or repeat. Older ones are kept as counts alone."""


class LastingChanges:
    """Counts the changes that were neither undone, nor discarded or repeated by a restart."""

    def __init__(self) -> None:
        self._older: Counter[str] = Counter()
        self._recent: list[tuple[int, ExpertChange]] = []
        """With the number of the attempt that carried the change out."""
        self._attempt = 0

    def add(self, change: ExpertChange) -> None:
        # A restart at step N may repeat the changes of step N.
        self._recent = [
            (attempt, old)
            for attempt, old in self._recent
            if old.step != change.step or attempt == self._attempt
        ]
        self._recent.append((self._attempt, change))
        if len(self._recent) > MAX_RECENT:
            self._fold_first_step()

    def begin_attempt(self) -> None:
        """From now on other processes train."""
        self._attempt += 1

    def cut(self, step: int) -> None:
        """Forget the changes past the step that training continues from."""
        self._recent = [entry for entry in self._recent if entry[1].step <= step]

    def counts(self) -> dict[str, int]:
        """Return the number of lasting changes by kind, and of undone ones."""
        counts = self._older + Counter(change_counts([change for _, change in self._recent]))
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def _fold_first_step(self) -> None:
        # Whole steps: an undone change and its undoing belong together.
        first_step = self._recent[0][1].step
        first = [change for _, change in self._recent if change.step == first_step]
        self._older.update(change_counts(first))
        self._recent = [entry for entry in self._recent if entry[1].step != first_step]
