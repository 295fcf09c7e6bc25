"""Counts and sums over all events of a run, also over those that a long record leaves out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event, Memory
from orchestrator.record.summary.speed import SpeedSums
from orchestrator.types import MEMORY_PARTS

NUM_FIRST = 5
"""Steps at the beginning whose losses are kept."""


@dataclass
class PeakSums:
    """The largest peak of memory in the events of epochs and ends, one by one."""

    largest: Memory | None = None
    reserved: float | None = None

    def add(self, memory: Memory | None) -> None:
        if memory is None:
            return
        if self.largest is None or memory.allocated > self.largest.allocated:
            self.largest = memory
        if memory.reserved is not None:
            self.reserved = max(memory.reserved, self.reserved or 0.0)

    def peak(self) -> Memory | None:
        """Return the largest peak, with the most that was reserved; None if nothing was measured."""
        if self.largest is None:
            return None
        parts = self.largest.parts
        known = {name: parts[name] for name in MEMORY_PARTS if name in parts}
        return replace(self.largest, reserved=self.reserved, parts=known)


@dataclass
class Totals:
    """Counts and sums, event by event. *Recorded* are all events, those too that a restart has discarded."""

    num_starts: int = 0
    num_steps: int = 0
    """Steps that count, each once."""
    step_seconds: float = 0.0
    num_recorded_steps: int = 0
    recorded_step_seconds: float = 0.0
    num_non_finite: int = 0
    """Steps that count whose loss is not a finite number."""
    first_non_finite: int | None = None
    first_losses: list[float] = field(default_factory=list)
    """Finite losses of the first steps that count: a long record leaves some of these steps out."""
    bad_samples: int = 0
    num_evaluations: int = 0
    """Recorded, as those below."""
    evaluation_seconds: float = 0.0
    num_checkpoints: int = 0
    checkpoint_seconds: float = 0.0
    num_stalls: int = 0
    """Checkpoints that say how long they blocked the training."""
    stall_seconds: float = 0.0
    expert_changes: dict[str, int] = field(default_factory=dict)
    """Recorded changes of experts by kind."""
    speed: SpeedSums = field(default_factory=SpeedSums)
    peak: PeakSums = field(default_factory=PeakSums)
    epochs: list[list[int]] = field(default_factory=list)
    """Ranges of the epochs that count: first and last."""
    uploads: list[int] = field(default_factory=list)
    """Steps of the checkpoints in the remote folder."""

    @property
    def num_epochs(self) -> int:
        return sum(last - first + 1 for first, last in self.epochs)

    @property
    def uploaded_step(self) -> int | None:
        """The newest checkpoint in the remote folder. The best one may be uploaded after a newer one."""
        return max(self.uploads, default=None)

    def add(self, event: Event, counts: bool) -> None:
        """Take an event. ``counts`` says whether no restart discards it."""
        match event:
            case kinds.Step():
                self._step(event, counts)
            case kinds.Start():
                self.num_starts += 1
                # A start abandons the checkpoints after its step.
                self.uploads = [step for step in self.uploads if step <= (event.step or 0)]
            case kinds.Evaluation():
                self.num_evaluations += 1
                self.evaluation_seconds += event.seconds or 0.0
            case kinds.Checkpoint():
                self._checkpoint(event)
            case kinds.Upload():
                self.uploads.append(event.step)
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
        if any(first <= epoch <= last for first, last in self.epochs):
            return
        if self.epochs and epoch == self.epochs[-1][1] + 1:
            self.epochs[-1][1] = epoch
        else:
            self.epochs.append([epoch, epoch])
