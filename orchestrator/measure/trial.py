"""A short run that measures the throughput of a configuration, for the trials of a sweep.

It runs real steps over real samples, until the throughput is known with a small confidence
interval. It leaves nothing behind, neither on disk nor in the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch

from orchestrator.config.settings import Config
from orchestrator.errors import TrainingFailed, UserError
from orchestrator.measure.timed_steps import WARM_UP_STEPS, TimedBlock, block_seconds, rate_of
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.planning import Plan
from orchestrator.record.events.kinds import Compile, Event, OutOfMemory
from orchestrator.tasks.task import Task
from orchestrator.train.data.steps import Feed, StepBatch
from orchestrator.train.device.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.group.world import World
from orchestrator.train.step.totals import Totals
from orchestrator.train.strategies.placement import decide_placement
from orchestrator.train.strategies.shares import assign_shares
from orchestrator.train.worker.build import build_evaluation, build_feed, check_has_metric
from orchestrator.train.worker.build_model import ModelParts, build_parts, build_stepper
from orchestrator.train.worker.placed_experts import ON_ONE_HOST, PlacedExperts
from orchestrator.train.worker.torch_settings import preserved_random_state, torch_settings

TARGET_INTERVAL = 0.03  # half the width of the confidence interval, as a share of the throughput
_BLOCK_S = 0.2  # of steps that are timed together: the clock and the synchronisation cost nothing next to it
_MIN_BLOCKS = 8


@dataclass(frozen=True)
class TrialLimits:
    """The end of a trial: after so many seconds of measured steps, or after exactly ``steps``,
    with an evaluation."""

    seconds: float
    steps: int | None = None
    metric: str | None = None
    """A validation metric that the evaluation must have."""


@dataclass(frozen=True)
class TrialResult:
    """The throughput after the steps so far. ``done`` says that no more steps are needed."""

    done: bool
    samples_per_second: float
    interval: float
    """Half the width of the confidence interval, as a share of the throughput; infinite for a
    single block."""
    units_per_second: float
    step_seconds: float
    steps: int
    seconds: float
    """Seconds of all steps, the warm-up included."""
    peak_memory_bytes: int
    phases: dict[str, float]
    train_loss: float
    validation_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@contextmanager
def open_trial(
    config: Config, plan: Plan, facts: ModelFacts, task: Task, world: World, limits: TrialLimits
) -> Iterator[ThroughputTrial]:
    """Build a trial with a model of its own, and free its memory at the end. All workers of a
    group must call it."""
    feed: Feed | None = None
    parts: ModelParts | None = None
    free_cached(world.device)  # memory of the previous trial that reference cycles kept
    try:
        with preserved_random_state(), torch_settings(config, plan, world.device):
            reset_peak(world.device)
            experts = ON_ONE_HOST
            if plan.strategy_facts.divides_experts:
                groups = plan.expert_replicas.value
                decision = decide_placement(config, plan, facts, world, {}, [], groups=groups)
                experts = PlacedExperts.by(decision)
            world = assign_shares(config, plan, world, {})[0]
            parts = build_parts(config, plan, task, world, _refuse_degraded_steps, experts)
            feed = build_feed(config, plan, task, world)
            yield ThroughputTrial(config, plan, task, world, parts, feed, limits)
    finally:
        if feed is not None:
            feed.close()
        if parts is not None and parts.compiled is not None:
            parts.compiled.undo()  # the next trial would run code compiled for the shapes of this one
        parts = None
        feed = None
        free_cached(world.device)


def _refuse_degraded_steps(event: Event) -> None:
    """End the trial if a step would continue in halves or uncompiled: its speed is not that of the
    configuration."""
    if isinstance(event, OutOfMemory):
        raise torch.OutOfMemoryError(f"out of memory with a micro-batch of {event.micro_batch}")
    if isinstance(event, Compile) and event.status == "failed":
        raise TrainingFailed(f"does not compile: {event.detail}")


class ThroughputTrial:
    """A model in training whose steps are timed in blocks. The first worker decides for all when
    to stop."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        task: Task,
        world: World,
        parts: ModelParts,
        feed: Feed,
        limits: TrialLimits,
    ) -> None:
        self._world = world
        self._parts = parts
        self._limits = limits
        self._feed = feed
        micro_batch = feed.micro_batch if parts.strategy.lockstep else feed.largest_micro_batch
        self._stepper = build_stepper(config, world, parts, micro_batch, _refuse_degraded_steps)
        self._evaluate = None
        if limits.steps is not None:
            self._evaluate = build_evaluation(config, plan, task, world, parts)
            if self._evaluate is not None and limits.metric is not None:
                check_has_metric(self._evaluate, limits.metric, "--objective")
        self._batches = self._endless_batches()
        self._units_per_sample = getattr(task, "units_per_sample", 1)
        self._step = 0
        self._samples = 0
        self._block_steps = 0
        self._blocks: list[TimedBlock] = []
        self._warm_up_seconds = 0.0
        self._last_totals: Totals | None = None

    def _endless_batches(self) -> Iterator[StepBatch]:
        """Yield batches without end.

        A trial that measures only throughput skips short last batches, so that every step has the
        planned batch and a compiler sees one shape.
        """
        takes_short = self._limits.steps is not None
        for epoch in count():
            num_batches = 0
            for batch in self._feed.steps(epoch):
                if takes_short or batch.global_samples == self._feed.global_batch:
                    num_batches += 1
                    yield batch
            if not num_batches:
                raise UserError(
                    f"the data has fewer samples than a step, which has {self._feed.global_batch}; "
                    "try smaller steps"
                )

    def run_part(self, part: float) -> TrialResult:
        """Continue for at most this part of the limits, or until the trial is done."""
        if not self._block_steps:
            self._warm_up()
        if self._limits.steps is None:
            done = self._advance_by_time(part * self._limits.seconds)
        else:
            done = self._advance_by_steps(self._limits.steps, math.ceil(part * self._limits.steps))
        return self._result(done)

    def _advance_by_time(self, pause_after_s: float) -> bool:
        """Time blocks until the pause or the end; return whether the trial is done."""
        start_s = self._measured_seconds()
        while True:
            self._blocks.append(self._time_block(self._block_steps))
            measured_s = self._measured_seconds()
            done = measured_s >= self._limits.seconds or self._is_precise()
            pause = measured_s - start_s >= pause_after_s
            done, pause = self._decide_together(done, pause)
            if done or pause:
                return done

    def _advance_by_steps(self, last_step: int, pause_after: int) -> bool:
        """Time blocks up to exactly the pause or the last step; return whether the trial is
        done."""
        pause_at = self._step + pause_after
        while True:
            steps_left = min(last_step, pause_at) - self._step
            self._blocks.append(self._time_block(max(1, min(self._block_steps, steps_left))))
            done, pause = self._decide_together(self._step >= last_step, self._step >= pause_at)
            if done or pause:
                return done

    def _is_precise(self) -> bool:
        return len(self._blocks) >= _MIN_BLOCKS and rate_of(self._blocks)[1] <= TARGET_INTERVAL

    def _measured_seconds(self) -> float:
        return sum(block.seconds for block in self._blocks)

    def _decide_together(self, *flags: bool) -> list[bool]:
        """Return the flags of the first worker: times differ, and all must run the same steps."""
        own = [float(flag and self._world.is_main) for flag in flags]
        return [value > 0 for value in self._world.all_reduce_max(own)]

    def _warm_up(self) -> None:
        """Run the first steps and choose the steps of a block from their time.

        Several workers warm up twice: they overlap gradient reductions with the backward pass only
        once a micro-batch has proved to fit.
        """
        max_steps = (self._limits.steps or math.inf) - 1  # at least one step is measured
        seconds = self._warm_up_steps(max_steps)
        if self._world.size > 1:
            self._parts.strategy.micro_batch_proven()
            seconds += self._warm_up_steps(max_steps)
        self._warm_up_seconds = sum(seconds)
        self._stepper.clock.take()
        step_s = self._world.all_reduce_max([min(seconds[-2:], default=0.0)])[0]
        self._block_steps = max(1, round(_BLOCK_S / max(1e-6, step_s)))

    def _warm_up_steps(self, max_steps: float) -> list[float]:
        """Time the steps of one warm-up, up to ``max_steps`` in all."""
        return [self._time_block(1).seconds for _ in range(WARM_UP_STEPS) if self._step < max_steps]

    def _time_block(self, steps: int) -> TimedBlock:
        samples_before = self._samples
        seconds = block_seconds(self._run_step, range(steps), self._world.device)
        return TimedBlock(seconds, steps, self._samples - samples_before)

    def _run_step(self, _: int) -> None:
        self._stepper.clock.begin()
        totals = self._stepper.run(next(self._batches), self._step)
        self._stepper.clock.end()
        self._step += 1
        self._samples += totals.samples
        self._last_totals = totals

    def _result(self, done: bool) -> TrialResult:
        rate, interval = rate_of(self._blocks)
        seconds = self._measured_seconds()
        steps = sum(block.steps for block in self._blocks)
        train_loss = self._train_loss()
        peak = self._world.all_reduce_max([float(peak_memory(self._world.device)["allocated"])])[0]
        phases = self._stepper.clock.take()
        validation_loss, metrics = self._validation()
        return TrialResult(
            done=done,
            samples_per_second=rate,
            interval=interval,
            units_per_second=rate * self._units_per_sample,
            step_seconds=seconds / steps,
            steps=steps,
            seconds=seconds + self._warm_up_seconds,
            peak_memory_bytes=int(peak),
            phases={name: value for name, value in phases.items() if name not in ("steps", "total")},
            train_loss=train_loss,
            validation_loss=validation_loss,
            metrics=metrics,
        )

    def _train_loss(self) -> float:
        assert self._last_totals is not None
        loss = float(self._last_totals.loss) / max(1.0, float(self._last_totals.count))
        if not math.isfinite(loss):
            raise TrainingFailed(f"step {self._step}: the loss is {loss}: the run has diverged")
        return loss

    def _validation(self) -> tuple[float | None, dict[str, float]]:
        if self._evaluate is None:
            return None, {}
        result = self._evaluate()
        loss = result["loss"]
        if not math.isfinite(loss):
            raise TrainingFailed(f"step {self._step}: the validation loss is {loss}: the run has diverged")
        return loss, result["metrics"]
