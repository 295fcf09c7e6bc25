"""The loop: fetch, forward, backward, step, record, until there is a reason to stop. It knows neither Ray nor Tune."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from orchestrator.errors import ResourceError, TrainingFailed
from orchestrator.record.events import Event
from orchestrator.record.log import Log
from orchestrator.train.checkpoint.snapshots import Snapshots
from orchestrator.train.checkpoint.state import Progress
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.data import Feed, StepBatch
from orchestrator.train.evaluate import Evaluation
from orchestrator.train.heartbeat import Heartbeat
from orchestrator.train.parts.memory import allocated_now, free_cached, peak_memory, release_idle, reset_peak
from orchestrator.train.pending import PendingStep, StepFigures, fetch_figures
from orchestrator.train.step import Stepper
from orchestrator.train.stopping import StopFlag


@dataclass(frozen=True)
class Cadence:
    """When things happen, in steps; 0 means at the end of each epoch."""

    total_steps: int
    epochs: int
    log_every: int
    evaluate_every: int = 0
    checkpoint_every: int = 0
    monitor_every: int = 0
    empty_cache_every: int = 0
    patience: int | None = None
    metric: str = "loss"


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``reason`` says why in words."""

    status: str
    reason: str


WARM_UP = 3  # first steps of a process, slower than the rest: recorded apart, and left out of the throughput


@dataclass(frozen=True)
class Training:
    """The parts that a loop trains with. ``progress`` is the point it starts from."""

    stepper: Stepper
    feed: Feed
    cadence: Cadence
    progress: Progress
    log: Log
    saver: CheckpointWriter
    evaluation: Evaluation | None = None
    snapshots: Snapshots | None = None

    def close(self) -> None:
        """End the threads and processes of the parts: checkpoint writer, data loaders, compiler log."""
        self.saver.close()
        self.feed.close()
        if self.evaluation is not None:
            self.evaluation.feed.close()
        if self.stepper.compiled is not None:
            self.stepper.compiled.close()


@dataclass(frozen=True)
class LoopHooks:
    """Connections of a loop to the code around it."""

    stop_requested: Callable[[], bool] = lambda: False
    after_step: Callable[[int], None] = lambda step: None  # noqa: ARG005
    monitor: Callable[[], dict[str, Any]] | None = None
    """Returns the newest reading of the machine."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


class Loop:
    """One worker's training, from ``progress`` to the end."""

    def __init__(self, training: Training, hooks: LoopHooks | None = None) -> None:
        hooks = hooks or LoopHooks()
        self.stepper = training.stepper
        self.feed = training.feed
        self.cadence = training.cadence
        self.progress = training.progress
        self.evaluate = training.evaluation
        self.saver = training.saver
        self.snapshots = training.snapshots
        self.monitor = hooks.monitor
        self._write = training.log.write_all
        self._tell = training.log.write
        self._stopping = StopFlag(training.stepper.world.device, hooks.stop_requested)
        self._after_step = hooks.after_step
        self._heartbeat = hooks.heartbeat
        self._pending: list[PendingStep] = []
        self._first = 0
        self._last_saved = -1
        self._peak: dict[str, int] = {}
        self._epoch_begun = 0.0
        self._window_begun = 0.0
        self._allocated: list[int] = []
        self._under_way: Generator[None, None, Outcome] | None = None

    def run(self) -> Outcome:
        """Train to the end."""
        while True:
            outcome = self.advance(self.cadence.total_steps + 1)
            if outcome is not None:
                return outcome

    def advance(self, steps: int, keep: bool = False) -> Outcome | None:
        """Train for so many steps, or to the end: then how it ended. Every way out has flushed its records; the end, unless it
        is a failure, leaves a checkpoint of the last step, and a segment a snapshot of its last one if it is to ``keep`` it."""
        if self._under_way is None:
            self._first = self._last_saved = self.progress.step
            self._window_begun = perf_counter()
            self._under_way = self._steps()
        try:
            for _ in range(steps):
                next(self._under_way)
            self._flush()
            if keep:
                self._snapshot()
            self._heartbeat.enter_phase("rest")
            return None
        except StopIteration as ended:
            outcome: Outcome = ended.value
        except BaseException:
            with suppress(Exception):
                self._flush()
                self.saver.poll()
            raise
        self._flush()
        self._save()
        self.saver.finish()
        if self.progress.step > self._first and self.saver.durable != self.progress.step:
            raise ResourceError(
                f"the last checkpoint could not be written; the newest is of step {self.saver.durable}: see the warnings"
            )
        return outcome

    def peak_memory(self) -> dict[str, int]:
        """The most memory the run has used so far, evaluation included."""
        now = peak_memory(self.stepper.world.device)
        self._peak = {name: max(value, self._peak.get(name, 0)) for name, value in now.items()}
        return self._peak

    def _steps(self) -> Generator[None, None, Outcome]:
        """The steps, with a rest after each."""
        progress, cadence = self.progress, self.cadence
        if progress.step and (progress.step >= cadence.total_steps or progress.epoch >= cadence.epochs):
            self._out_of_patience()
            return Outcome(
                "completed",
                f"nothing left to do at step {progress.step}: raise --epochs or --max-steps to go on",
            )
        # an epoch's checkpoint is written before its evaluation: a run killed in between evaluates now
        evaluated = progress.validation.get("step") == progress.step
        at_the_end = progress.position == 0 and not cadence.evaluate_every
        if progress.step and (evaluated or at_the_end) and self._out_of_patience():
            return self._stopped_early()
        while progress.epoch < cadence.epochs:
            self._begin_epoch()
            for portion in self._timed(self.feed.steps(progress.epoch, progress.position)):
                if progress.step >= cadence.total_steps:
                    self._out_of_patience()
                    return Outcome("completed", f"{cadence.total_steps} steps done")
                stop = self._step(portion)
                if self._due_evaluation() and self._out_of_patience():
                    return self._stopped_early()
                if cadence.checkpoint_every and progress.step % cadence.checkpoint_every == 0:
                    self._save()
                if self.snapshots is not None:
                    self.snapshots.prepare()
                    if self.snapshots.due(progress.step):
                        self._snapshot()
                if stop:
                    return Outcome("stopped", "interrupted")
                yield
            if self._end_epoch():
                return self._stopped_early()
        self._out_of_patience()
        return Outcome("completed", f"{cadence.epochs} epochs done")

    def _stopped_early(self) -> Outcome:
        return Outcome("completed", f"no better {self.cadence.metric} in {self.cadence.patience} evaluations")

    def close(self) -> None:
        """Drop the steps in progress, which hold the model. ``Training.close`` ends the parts."""
        self._heartbeat.enter_phase("save")  # the checkpoint writer may still be at work
        self._under_way = None

    def _timed(self, steps: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The steps of the feed, with the wait for each counted as its data phase."""
        while True:
            self.stepper.clock.begin()
            self._heartbeat.enter_phase("data")
            try:
                portion = next(steps)
            except StopIteration:
                return
            yield portion

    def _step(self, portion: StepBatch) -> bool:
        """One step. Returns whether the run, on all its workers, is to stop after it."""
        progress = self.progress
        self._heartbeat.enter_phase("first step" if progress.step == self._first else "step", progress.step)
        lr = self.stepper.optimizer.learning_rate(progress.step)
        totals = self.stepper.run(portion, progress.step, self._stopping.asked())
        seconds = self.stepper.clock.end()
        progress.step += 1
        progress.position += totals.samples
        progress.samples += totals.samples
        self._pending.append(PendingStep(progress.step, progress.epoch, lr, seconds, totals))
        warming = progress.step - self._first == WARM_UP
        if warming or len(self._pending) >= self.cadence.log_every:
            self._flush()
        if (
            self.cadence.monitor_every
            and self.monitor is not None
            and progress.step % self.cadence.monitor_every == 0
        ):
            self._tell("monitor", step=progress.step, **self.monitor())
        if self.cadence.empty_cache_every and progress.step % self.cadence.empty_cache_every == 0:
            free_cached(self.stepper.world.device)
        self.saver.poll()
        self._after_step(progress.step)
        return self._stopping.should_stop(totals.stop_votes)

    def _flush(self) -> None:
        """Fetch the figures of the steps since the last time, in one transfer, and record them."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        fetched = fetch_figures(pending)
        self.stepper.world.membership.check()
        if (
            self.stepper.world.device.type != "cpu"
        ):  # the host ran ahead: only now has it waited for the device
            mean = (perf_counter() - self._window_begun) / len(pending)
            pending = [replace(entry, seconds=mean) for entry in pending]
        events = [self._step_event(entry, figures) for entry, figures in zip(pending, fetched, strict=True)]
        phases = self.stepper.clock.take()
        if phases:
            total = sum(entry.seconds for entry in pending) / len(pending)
            events.append(
                {"event": "phases", "time": time.time(), "step": self.progress.step, **phases, "total": total}
            )
        if pending[-1].totals.exchange_stats is not None and self.stepper.strategy.num_expert_grads:
            sent, rows, waited = (
                torch.stack(
                    [p.totals.exchange_stats for p in pending if p.totals.exchange_stats is not None]
                ).mean(0)
            ).tolist()
            fields = {"bytes": sent, "rows": rows, "seconds": waited / self.stepper.world.size}
            events.append(
                {
                    "event": "exchange",
                    "time": time.time(),
                    "step": self.progress.step,
                    "steps": len(pending),
                    **fields,
                }
            )
        if pending[0].totals.loads:
            loads = [
                torch.stack(layer).sum(0).tolist()
                for layer in zip(*(p.totals.loads for p in pending), strict=True)
            ]
            events.append(
                {
                    "event": "load",
                    "time": time.time(),
                    "step": self.progress.step,
                    "steps": len(pending),
                    "loads": loads,
                }
            )
        self._write(events)
        self._check(events)
        self._window_begun = perf_counter()

    def _step_event(self, entry: PendingStep, figures: StepFigures) -> Event:
        count, loss = figures.count, figures.loss / max(1.0, figures.count)
        self.progress.epoch_loss += loss * count
        self.progress.epoch_count += count
        self.progress.epoch_seconds += entry.seconds
        return {
            "event": "step",
            "time": time.time(),
            "step": entry.step,
            "epoch": entry.epoch,
            "loss": loss,
            "grad_norm": figures.norm,
            "lr": entry.lr,
            "samples": entry.totals.samples,
            "units": count,
            "seconds": entry.seconds,
            "metrics": {name: value / max(1.0, count) for name, value in figures.metrics.items()},
            **({"warm_up": True} if entry.step - self._first <= WARM_UP else {}),
        }

    def _check(self, events: list[Event]) -> None:
        """A run that has diverged stops here, before anything of it is saved over a good checkpoint."""
        fp16 = self.stepper.precision.scale is not None
        for event in events:
            if event["event"] == "step" and not _finite(
                event["loss"] if fp16 else event["loss"] + event["grad_norm"]
            ):
                raise TrainingFailed(
                    f"step {event['step']}: loss {event['loss']}, gradient norm {event['grad_norm']}: the run has diverged. "
                    "Lower --learning-rate, raise --warmup-steps, or keep --clip-norm on. Nothing of it was saved"
                )
        if self.stepper.precision.scale_underflowed():
            raise TrainingFailed(
                "fp16: gradients overflow at every loss scale; use --precision bf16 or fp32, or lower --learning-rate"
            )
        if self.stepper.compiled is not None:
            complaint = self.stepper.compiled.recompile_warning()
            if complaint:
                self._tell("warning", kind="compile", message=complaint)

    def _begin_epoch(self) -> None:
        self._epoch_begun = perf_counter()
        self.peak_memory()
        reset_peak(self.stepper.world.device)

    def _end_epoch(self) -> bool:
        """Close the books of an epoch. Returns whether early stopping says to stop."""
        progress = self.progress
        self._flush()
        device = self.stepper.world.device
        self._tell(
            "epoch",
            epoch=progress.epoch,
            step=progress.step,
            seconds=perf_counter() - self._epoch_begun,
            samples=self.feed.samples,
            loss=progress.epoch_loss / max(1.0, progress.epoch_count),
            samples_per_second=self.feed.samples / max(1e-9, progress.epoch_seconds),
            memory=self._peak_of_all(device),
        )
        self._watch_for_leak(device)
        progress.epoch += 1
        progress.position = 0
        progress.epoch_loss = progress.epoch_count = progress.epoch_seconds = 0.0
        if self.cadence.checkpoint_every == 0:  # before the evaluation, which may fail
            self._save()
        release_idle(device)
        return self.cadence.evaluate_every == 0 and self._out_of_patience()

    def _peak_of_all(self, device: torch.device) -> dict[str, int]:
        """The most memory that any worker used in this epoch."""
        mine = peak_memory(device)
        return {
            name: int(value)
            for name, value in zip(mine, self.stepper.world.all_reduce_max(list(mine.values())), strict=True)
        }

    def _watch_for_leak(self, device: torch.device) -> None:
        """Memory that is still held at the end of each epoch should not grow from one to the next."""
        self._allocated.append(allocated_now(device))
        last = self._allocated[-4:]
        if len(last) == 4 and all(later > earlier * 1.01 for earlier, later in pairwise(last)):
            message = f"allocated memory rose over four epochs, from {last[0]} to {last[-1]} bytes: something holds on to tensors"
            self._tell("warning", kind="leak", message=message)

    def _due_evaluation(self) -> bool:
        return bool(self.cadence.evaluate_every) and self.progress.step % self.cadence.evaluate_every == 0

    def _out_of_patience(self) -> bool:
        """Evaluate this step, unless that is done already, and say whether patience has run out."""
        if self.evaluate is not None and self.progress.validation.get("step") != self.progress.step:
            self._evaluate(self.evaluate)
        return self.cadence.patience is not None and self.progress.bad_evaluations >= self.cadence.patience

    def _evaluate(self, evaluation: Evaluation) -> None:
        """Evaluate, and keep the best."""
        self._flush()
        progress = self.progress
        self._heartbeat.enter_phase("evaluate")
        result = evaluation()
        values = {"loss": result["loss"], **result["metrics"]}
        value = metric_of(values, self.cadence.metric)
        better = is_better(value, progress.best_value, self.cadence.metric)
        if better:
            progress.best_value, progress.best_step, progress.bad_evaluations = value, progress.step, 0
        else:
            progress.bad_evaluations += 1
        progress.validation = {**values, "step": progress.step}
        epoch = progress.epoch if progress.position else max(0, progress.epoch - 1)
        self._tell("evaluate", step=progress.step, epoch=epoch, best=better, **result)
        self._window_begun = perf_counter()
        if better and (self.cadence.evaluate_every or self.cadence.checkpoint_every):
            self._save()

    def _snapshot(self) -> None:
        """A copy in memory. What the epoch's sums are missing is fetched first."""
        if self.snapshots is not None:
            self._heartbeat.enter_phase("snapshot")
            self._flush()
            self.snapshots.take(self.progress)
            self._window_begun = perf_counter()

    def _save(self) -> None:
        """Save, unless this step is saved already."""
        self._heartbeat.enter_phase("save")
        self._flush()
        if self._last_saved != self.progress.step:
            self.saver.save(self.progress)
            self._last_saved = self.progress.step
        self._window_begun = perf_counter()


def metric_of(values: dict[str, float], name: str) -> float:
    if name not in values:
        raise TrainingFailed(
            f"--early-stopping-metric {name!r} is not among the validation metrics: {', '.join(values)}"
        )
    return values[name]


def is_better(value: float, best: float | None, metric: str) -> bool:
    """Whether a result beats the best so far. What is not a number never does, and never stands in the way."""
    if not _finite(value):
        return False
    if best is None or not _finite(best):
        return True
    smaller_is_better = "loss" in metric or "error" in metric or metric == "perplexity"
    return value < best if smaller_is_better else value > best


def _finite(value: float) -> bool:
    return value - value == 0.0
