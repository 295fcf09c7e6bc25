"""Counts and sums over all events of a run, also over those that a long record leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.record.files.events import Event
from orchestrator.record.files.scalars import to_float
from orchestrator.record.files.validate import is_finite_number
from orchestrator.record.summary.peak_memory import PeakSums
from orchestrator.record.summary.speed import SpeedSums

NUM_FIRST = 5
"""Steps at the beginning whose losses are kept."""


class Totals:
    """Counts and sums, event by event. *Recorded* are all events, those too that a restart has discarded."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.num_steps = 0
        """Steps that count, each once."""
        self.step_seconds = 0.0
        self.num_recorded_steps = 0
        self.recorded_step_seconds = 0.0
        self.num_non_finite = 0
        """Steps that count whose loss is not a finite number."""
        self.first_non_finite: int | None = None
        self.first_losses: list[float] = []
        """Finite losses of the first steps that count: a long record leaves some of these steps out."""
        self.bad_samples = 0
        self.num_evaluations = 0
        """Recorded, as those below."""
        self.evaluation_seconds = 0.0
        self.num_checkpoints = 0
        self.checkpoint_seconds = 0.0
        self.num_stalls = 0
        """Checkpoints that say how long they blocked the training."""
        self.stall_seconds = 0.0
        self.expert_changes: dict[str, int] = {}
        """Recorded changes of experts by kind."""
        self.speed = SpeedSums()
        self.peak = PeakSums()
        self._epochs: list[list[int]] = []
        """Ranges of the epochs that count: first and last."""
        self._uploads: list[int] = []
        """Steps of the checkpoints in the remote folder."""

    @property
    def num_epochs(self) -> int:
        return sum(last - first + 1 for first, last in self._epochs)

    @property
    def uploaded_step(self) -> int | None:
        """The newest checkpoint in the remote folder. The best one may be uploaded after a newer one."""
        return max(self._uploads, default=None)

    def add(self, event: Event, counts: bool) -> None:
        """Take a valid event. ``counts`` says whether no restart discards it."""
        self.peak.add(event)
        match event["event"]:
            case "step":
                self._step(event, counts)
            case "start":
                self.num_starts += 1
                # A start abandons the checkpoints after its step.
                self._uploads = [step for step in self._uploads if step <= (event.get("step") or 0)]
            case "evaluate":
                self.num_evaluations += 1
                self.evaluation_seconds += _seconds(event, "seconds") or 0.0
            case "checkpoint":
                self._checkpoint(event)
            case "upload":
                self._uploads.append(event["step"])
            case "epoch" if counts:
                self._epoch(event["epoch"])
            case "bad_samples" if counts:
                self.bad_samples += event["count"]
            case "expert":
                kind = str(event.get("change"))
                self.expert_changes[kind] = self.expert_changes.get(kind, 0) + 1
            case _:
                pass

    def _step(self, event: Event, counts: bool) -> None:
        seconds = event["seconds"]
        self.num_recorded_steps += 1
        self.recorded_step_seconds += seconds
        if not counts:
            return
        self.num_steps += 1
        self.step_seconds += seconds
        self.speed.add(event)
        loss = to_float(event["loss"])
        if loss is not None and math.isfinite(loss) and len(self.first_losses) < NUM_FIRST:
            self.first_losses.append(loss)
        if loss is not None and not math.isfinite(loss):
            self.num_non_finite += 1
            self.first_non_finite = event["step"] if self.first_non_finite is None else self.first_non_finite

    def _checkpoint(self, event: Event) -> None:
        self.num_checkpoints += 1
        seconds = _seconds(event, "seconds")
        self.checkpoint_seconds += seconds or 0.0
        # A checkpoint that does not say otherwise blocked the training for its whole time.
        stall = _seconds(event, "stall") if "stall" in event else seconds
        if stall is not None:
            self.num_stalls += 1
            self.stall_seconds += stall

    def _epoch(self, epoch: int) -> None:
        if any(first <= epoch <= last for first, last in self._epochs):
            return
        if self._epochs and epoch == self._epochs[-1][1] + 1:
            self._epochs[-1][1] = epoch
        else:
            self._epochs.append([epoch, epoch])

    def to_json(self) -> dict[str, Any]:
        parts = {"speed": self.speed.to_json(), "peak": self.peak.to_json()}
        return {name.lstrip("_"): value for name, value in vars(self).items()} | parts

    def load(self, content: Mapping[str, Any]) -> None:
        """Continue from what ``to_json`` returned."""
        for name, value in vars(self).items():
            saved = content[name.lstrip("_")]
            if isinstance(value, SpeedSums | PeakSums):
                value.load(saved)
            elif isinstance(value, int | float):
                setattr(self, name, type(value)(saved))
            else:
                setattr(self, name, saved)


def _seconds(event: Event, name: str) -> float | None:
    value = event.get(name)
    return float(value) if is_finite_number(value) else None
