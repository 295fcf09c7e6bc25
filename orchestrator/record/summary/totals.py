"""Counts and sums over all events of a run, also over those that a long record leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
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
        """Take an event. ``counts`` says whether no restart discards it."""
        match event:
            case kinds.Step():
                self._step(event, counts)
            case kinds.Start():
                self.num_starts += 1
                # A start abandons the checkpoints after its step.
                self._uploads = [step for step in self._uploads if step <= (event.step or 0)]
            case kinds.Evaluation():
                self.num_evaluations += 1
                self.evaluation_seconds += event.seconds or 0.0
            case kinds.Checkpoint():
                self._checkpoint(event)
            case kinds.Upload():
                self._uploads.append(event.step)
            case kinds.Epoch():
                self.peak.add(event.memory)
                if counts:
                    self._epoch(event.epoch)
            case kinds.End():
                self.peak.add(event.memory)
            case kinds.BadSamples() if counts:
                self.bad_samples += event.count
            case kinds.ExpertChange():
                self.expert_changes[event.change] = self.expert_changes.get(event.change, 0) + 1
            case _:
                pass

    def _step(self, step: kinds.Step, counts: bool) -> None:
        seconds = step.seconds or 0.0
        self.num_recorded_steps += 1
        self.recorded_step_seconds += seconds
        if not counts:
            return
        self.num_steps += 1
        self.step_seconds += seconds
        self.speed.add(step)
        if step.loss is None:
            return
        if not math.isfinite(step.loss):
            self.num_non_finite += 1
            self.first_non_finite = step.step if self.first_non_finite is None else self.first_non_finite
        elif len(self.first_losses) < NUM_FIRST:
            self.first_losses.append(step.loss)

    def _checkpoint(self, checkpoint: kinds.Checkpoint) -> None:
        self.num_checkpoints += 1
        self.checkpoint_seconds += checkpoint.seconds or 0.0
        # A checkpoint that does not say otherwise blocked the training for its whole time.
        stall = checkpoint.seconds if checkpoint.stall is None else checkpoint.stall
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
