"""Records the steps of a loop as events: times, losses, phases, token exchange, expert load."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experts.host_copy import to_host
from experts.model import structure_of
from orchestrator.errors import TrainingFailed
from orchestrator.record.events import kinds
from orchestrator.train.data.bad_inputs import ADVICE, find_bad_input
from orchestrator.train.loop.training import Training
from orchestrator.train.loop.validation import DeclaredNames
from orchestrator.train.step.totals import Totals, check_metric_names

# The first steps of a process are slower than the rest: marked, and excluded from the throughput.
_WARM_UP_STEPS = 3

_DIVERGED = "the run has diverged. Lower --learning-rate, raise --warmup-steps, or keep --clip-norm on"
_BAD_FROM_THE_START = (
    "no weight has been trained yet, so the learning rate is not the cause. Look in the model and the loss "
    "for a division by zero, the logarithm of zero, a mask that leaves nothing, or an overflow"
)


@dataclass(frozen=True)
class PendingStep:
    """A step whose figures are still on the device."""

    step: int
    epoch: int
    lr: float
    seconds: float
    totals: Totals


@dataclass(frozen=True)
class StepFigures:
    """The sums of one step over the global batch, on the host."""

    loss: float
    norm: float
    count: float
    metrics: dict[str, float]


def fetch_figures(pending: list[PendingStep]) -> list[StepFigures]:
    """Copy the figures of several steps to the host: one transfer, and one kernel per figure."""
    totals = [entry.totals for entry in pending]
    metric_names = list(totals[0].metrics)
    for each in totals:
        check_metric_names(each.metrics, metric_names)
    columns: list[list[Any]] = [[t.loss for t in totals], [t.norm for t in totals]]
    columns += [[t.metrics[name] for t in totals] for name in metric_names]
    # A count is a tensor on the device, or an int that the host knows already.
    counts_on_device = isinstance(totals[0].count, Tensor)
    if counts_on_device:
        columns.append([t.count for t in totals])
    device = totals[0].loss.device
    table = torch.stack([torch.stack(column).to(device, torch.float64) for column in columns])
    figures = []
    for row, total in zip(to_host(table.T).tolist(), totals, strict=True):
        count = row[-1] if counts_on_device else float(total.count)
        metrics = dict(zip(metric_names, row[2:], strict=False))
        figures.append(StepFigures(row[0], row[1], count, metrics))
    return figures


class StepRecorder:
    """Collects finished steps and writes their events, several at once.

    Reading a figure makes the host wait for the device, so it is done rarely and for many steps
    together."""

    def __init__(self, training: Training) -> None:
        self._stepper = training.stepper
        self._feed = training.feed
        self._progress = training.progress
        self._log = training.log
        self._heartbeat = training.heartbeat
        self._log_every = training.cadence.log_every
        self._first_step = training.progress.step
        self._pending: list[PendingStep] = []
        self._window_began_s = 0.0
        # Where there is validation data, the first evaluation compares the names.
        names = DeclaredNames(self._stepper.strategy.task, training.log)
        self._declared_names = names if training.evaluation is None else None
        self._units_per_sample: int = getattr(self._stepper.strategy.task, "units_per_sample", 1)

    def restart_window(self) -> None:
        """Start the time of the next steps now, after an evaluation, a checkpoint or a snapshot."""
        self._window_began_s = perf_counter()

    def add(self, step: PendingStep) -> None:
        """Add a finished step.

        Every ``log_every`` steps, after the first step, and at the end of the warm-up, write the
        events."""
        self._pending.append(step)
        # Write the first event at once: the driver times a restart by it, and a user whose steps are slow
        # sees the first loss.
        is_early = step.step - self._first_step in (1, _WARM_UP_STEPS)
        if is_early or len(self._pending) >= self._log_every:
            self.flush()

    def flush(self) -> None:
        """Fetch the figures of the collected steps from the device and write their events.

        Raises ``TrainingFailed`` if the run has diverged: every save flushes first, so that a
        diverged state never replaces a good checkpoint."""
        if not self._pending:
            return
        steps = self._pending
        self._pending = []
        figures = fetch_figures(steps)
        # Figures of a group that was left meanwhile may be wrong: do not record them.
        self._stepper.world.membership.check()
        self._stepper.strategy.context.finish_row_checks()
        if self._stepper.world.device.type != "cpu":
            # The host ran ahead of the device and has waited for it only now: single step times
            # mean nothing.
            mean_s = (perf_counter() - self._window_began_s) / len(steps)
            steps = [replace(step, seconds=mean_s) for step in steps]
        events: list[kinds.Event] = [self._step_event(*pair) for pair in zip(steps, figures, strict=True)]
        events += self._phases_events(steps)
        events += self._exchange_events(steps)
        events += self._load_events(steps)
        with self._heartbeat.within("save"):  # the drive may be slow
            self._log.write(*events)
        self._check_finite(figures, steps)
        if self._declared_names is not None:
            self._declared_names.compare(figures[0].metrics)
        self._warn_of_recompiles()
        self.restart_window()

    def _step_event(self, step: PendingStep, figures: StepFigures) -> kinds.Step:
        """Return the event of a step, and add the step to the sums of its epoch."""
        count = figures.count
        loss = figures.loss / max(1.0, count)
        self._progress.epoch_loss += loss * count
        self._progress.epoch_count += count
        self._progress.epoch_seconds += step.seconds
        return kinds.Step(
            time=time.time(),
            step=step.step,
            epoch=step.epoch,
            loss=loss,
            grad_norm=figures.norm,
            lr=step.lr,
            samples=step.totals.samples,
            units=step.totals.samples * self._units_per_sample if self._units_per_sample > 1 else count,
            seconds=step.seconds,
            metrics={name: value / max(1.0, count) for name, value in figures.metrics.items()},
            warm_up=self._is_warm_up(step),
        )

    def _is_warm_up(self, last: PendingStep) -> bool:
        """Return whether an event whose last step is ``last`` is one of the warm-up.

        Events are written at the end of the warm-up, so that none mixes its steps with later ones."""
        return last.step - self._first_step <= _WARM_UP_STEPS

    def _phases_events(self, steps: Sequence[PendingStep]) -> list[kinds.Event]:
        phases = self._stepper.clock.take()
        if not phases:
            return []
        # The clock's total is of the host, which runs ahead of a GPU: the mean of the steps
        # replaces it.
        total_s = sum(step.seconds for step in steps) / len(steps)
        phases["total"] = total_s
        return [kinds.Phases(step=self._progress.step, warm_up=self._is_warm_up(steps[-1]), **phases)]

    def _exchange_events(self, steps: Sequence[PendingStep]) -> list[kinds.Event]:
        """Return the mean cost per step of the token exchange between hosts."""
        per_step = [step.totals.exchange_stats for step in steps]
        stats = [tensor for tensor in per_step if tensor is not None]
        if per_step[-1] is None or not self._stepper.strategy.num_expert_grads:
            return []
        sent_bytes, rows, seconds_of_all = torch.stack(stats).mean(0).tolist()
        seconds = seconds_of_all / self._stepper.world.size
        return [
            kinds.Exchange(
                step=self._progress.step,
                steps=len(steps),
                bytes=sent_bytes,
                rows=rows,
                seconds=seconds,
                warm_up=self._is_warm_up(steps[-1]),
            )
        ]

    def _load_events(self, steps: Sequence[PendingStep]) -> list[kinds.Event]:
        """Return the tokens per expert of each MoE layer, summed over the steps."""
        if not steps[0].totals.loads:
            return []
        by_layer = zip(*(step.totals.loads for step in steps), strict=True)
        loads = tuple(tuple(torch.stack(layer).sum(0).tolist()) for layer in by_layer)
        structures = structure_of(self._stepper.strategy.model)
        # Without ids, expert i has the id i.
        changed = any(layer.ids != tuple(range(len(layer.ids))) for layer in structures)
        ids = tuple(layer.ids for layer in structures) if changed else ()
        return [kinds.Load(step=self._progress.step, steps=len(steps), loads=loads, ids=ids)]

    def _check_finite(self, figures: Sequence[StepFigures], steps: Sequence[PendingStep]) -> None:
        # Under fp16 an infinite norm is ordinary: the step is skipped and the loss scale halved.
        fp16 = self._stepper.precision.scale is not None
        for step, figure in zip(steps, figures, strict=True):
            loss = figure.loss / max(1.0, figure.count)
            if not math.isfinite(loss if fp16 else loss + figure.norm):
                cause = self._bad_input(steps, step) or (_DIVERGED if step.step > 1 else _BAD_FROM_THE_START)
                raise TrainingFailed(
                    f"step {step.step}: loss {loss}, gradient norm {figure.norm}: {cause}. "
                    "The state after this step was not saved"
                )
        if self._stepper.precision.scale_underflowed():
            raise TrainingFailed(
                "fp16: gradients overflow at every loss scale; "
                "use --precision bf16 or fp32, or lower --learning-rate"
            )

    def _bad_input(self, steps: Sequence[PendingStep], bad: PendingStep) -> str | None:
        """Return a sentence about NaN or infinity in the samples of a step, if there are any."""
        # The steps are of one epoch, and the last of them ends at the present position.
        later = sum(step.totals.samples for step in steps if step.step >= bad.step)
        begin = self._progress.position - later
        sentence = find_bad_input(self._feed.named_samples(bad.epoch, begin, bad.totals.samples))
        return f"{sentence}. {ADVICE}" if sentence else None

    def _warn_of_recompiles(self) -> None:
        if self._stepper.compiled is None:
            return
        message = self._stepper.compiled.recompile_warning()
        if message:
            self._log.write(kinds.Warned(kind="compile", message=message))
