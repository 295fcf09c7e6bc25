"""A short run that measures: real steps over real samples, warm-up left out, until the throughput is known well enough. For the
trials of a sweep. It leaves nothing behind, neither on disk nor in the process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist
from time import perf_counter

import torch

from orchestrator.config.settings import Config
from orchestrator.errors import TrainingFailed
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.planning import Plan
from orchestrator.tasks.task import Task
from orchestrator.train.data import Feed, StepBatch
from orchestrator.train.parts.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.placement import decide_placement
from orchestrator.train.strategies.shares import assign_shares
from orchestrator.train.totals import Totals
from orchestrator.train.worker.build import build_evaluation, build_feed
from orchestrator.train.worker.build_model import ModelParts, build_parts, build_stepper
from orchestrator.train.worker.torch_settings import preserved_random_state, torch_settings

WELL_ENOUGH = 0.03  # half the width of the confidence interval, as a part of the throughput
_WARM_UP = 4  # steps; and as many again where workers begin to sum gradients during the backward pass
_BLOCK_SECONDS = (
    0.2  # of steps that are timed together: the clock, and the wait for a device, cost nothing beside it
)
_LEAST_BLOCKS, _MOST_BLOCKS = 8, 16
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class TrialLimits:
    """When a measurement ends at the latest: after so many seconds of measured steps; or, where ``steps`` are given, after exactly
    those, with an evaluation."""

    seconds: float
    steps: int | None = None


@dataclass(frozen=True)
class TrialResult:
    """What the steps so far have shown. ``done`` says that there is no need for more."""

    done: bool
    samples_per_second: float
    interval: float
    units_per_second: float
    step_seconds: float
    steps: int
    seconds: float
    """Of the steps, those for warming up included."""
    peak_memory_bytes: int
    phases: dict[str, float]
    train_loss: float
    validation_loss: float | None = None


@dataclass(frozen=True)
class TimedBlock:
    """Steps that were timed together."""

    seconds: float
    steps: int
    samples: int


@contextmanager
def open_trial(
    config: Config, plan: Plan, facts: ModelFacts, task: Task, world: World, limits: TrialLimits
) -> Iterator[ThroughputTrial]:
    """A measurement, from a model of its own to the memory it is to leave free. All workers of a group do the same."""
    feed: Feed | None = None
    parts: ModelParts | None = None
    free_cached(world.device)  # what the trial before left in cycles is not this one's
    try:
        with preserved_random_state(), torch_settings(config, plan, world.device):
            reset_peak(world.device)
            host_of = None
            if plan.strategy.value == "expert_parallel":
                host_of = decide_placement(config, plan, facts, world, {}, []).host_of
            world = (
                world.with_data_on_main()
                if plan.data_ranks < world.size
                else assign_shares(config, plan, world, {})[0]
            )
            parts = build_parts(config, plan, task, world, _no_news, host_of)
            feed = build_feed(plan, task, world, config.run.seed)
            yield ThroughputTrial(config, plan, task, world, parts, feed, limits)
    finally:
        if feed is not None:
            feed.close()
        if parts is not None and parts.compiled is not None:
            parts.compiled.undo()  # or the next trial would run what was compiled for the shapes of this one
        parts = feed = None
        free_cached(world.device)


def _no_news(event: str, **fields: object) -> None:
    """A step that would go on in halves, or uncompiled, is not the step that was to be measured."""
    if event == "oom":
        raise torch.OutOfMemoryError(f"out of memory with a micro-batch of {fields['micro_batch']}")
    if event == "compile" and fields["status"] == "failed":
        raise TrainingFailed(f"does not compile: {fields['detail']}")


class ThroughputTrial:
    """A model in training, whose steps are timed in blocks. The first worker decides for all when there are enough."""

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
        self._world, self._parts, self._limits, self._feed = world, parts, limits, feed
        held = feed.micro_batch if parts.strategy.lockstep else feed.largest_micro_batch
        self._stepper = build_stepper(config, world, parts, held, _no_news)
        self._evaluate = (
            build_evaluation(config, plan, task, world, parts) if limits.steps is not None else None
        )
        self._portions = self._endless()
        self._units, self._step, self._block_steps = getattr(task, "units_per_sample", 1), 0, 0
        self._blocks: list[TimedBlock] = []
        self._warm_seconds = 0.0
        self._last: Totals | None = None

    def _endless(self) -> Iterator[StepBatch]:
        """Steps without end. Where throughput is all that counts, whole ones only: what is measured is the batch that was asked for,
        and a compiler sees one shape."""
        for epoch in count():
            for portion in self._feed.steps(epoch):
                if self._limits.steps is not None or portion.global_samples == self._feed.global_batch:
                    yield portion

    def advance(self, part: float) -> TrialResult:
        """Go on by so large a part of what is allowed at most, or until it is done."""
        if not self._block_steps:
            self._warm_up()
        begun, steps = self._spent(), self._limits.steps
        pause_at = self._step + math.ceil(part * steps) if steps is not None else 0
        while True:
            if steps is None:
                self._blocks.append(self._timed(self._block_steps))
                done = self._spent() >= self._limits.seconds or self._well_known()
                pause = self._spent() - begun >= part * self._limits.seconds
            else:
                self._blocks.append(
                    self._timed(max(1, min(self._block_steps, min(steps, pause_at) - self._step)))
                )
                done, pause = self._step >= steps, self._step >= pause_at
            done, pause = self._agreed(done, pause)
            if done or pause:
                return self._measured(done)

    def _well_known(self) -> bool:
        return len(self._blocks) >= _LEAST_BLOCKS and rate_of(self._blocks)[1] <= WELL_ENOUGH

    def _spent(self) -> float:
        return sum(block.seconds for block in self._blocks)

    def _agreed(self, *mine: bool) -> list[bool]:
        """What the first worker says."""
        return [
            value > 0
            for value in self._world.all_reduce_max([float(flag and self._world.is_main) for flag in mine])
        ]

    def _warm_up(self) -> None:
        """First steps are slower than the rest: caches, the allocator, a compiler; and reductions that begin during the backward
        pass only once a micro-batch has proved to fit."""
        most = (self._limits.steps or math.inf) - 1  # one step at least is measured
        seconds = [self._timed(1).seconds for _ in range(_WARM_UP) if self._step < most]
        if self._world.size > 1:
            self._parts.strategy.micro_batch_proven()
            seconds += [self._timed(1).seconds for _ in range(_WARM_UP) if self._step < most]
        self._warm_seconds = sum(seconds)
        self._stepper.clock.take()
        longest = self._world.all_reduce_max([min(seconds[-2:], default=0.0)])[0]
        self._block_steps = max(1, round(_BLOCK_SECONDS / max(1e-6, longest)))

    def _timed(self, steps: int) -> TimedBlock:
        samples, begun = 0, perf_counter()
        for _ in range(steps):
            self._stepper.clock.begin()
            totals = self._stepper.run(next(self._portions), self._step)
            self._stepper.clock.end()
            self._step, self._last, samples = self._step + 1, totals, samples + totals.samples
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return TimedBlock(perf_counter() - begun, steps, samples)

    def _measured(self, done: bool) -> TrialResult:
        assert self._last is not None
        loss = float(self._last.loss) / max(1.0, float(self._last.count))
        if not math.isfinite(loss):
            raise TrainingFailed(f"step {self._step}: the loss is {loss}: the run has diverged")
        rate, interval = rate_of(self._blocks)
        seconds, steps = self._spent(), sum(block.steps for block in self._blocks)
        peak = int(self._world.all_reduce_max([float(peak_memory(self._world.device)["allocated"])])[0])
        phases = {
            name: value
            for name, value in self._stepper.clock.take().items()
            if name not in ("steps", "total")
        }
        evaluated = self._evaluate()["loss"] if self._evaluate is not None else None
        if evaluated is not None and not math.isfinite(evaluated):
            raise TrainingFailed(
                f"step {self._step}: the validation loss is {evaluated}: the run has diverged"
            )
        return TrialResult(
            done=done,
            samples_per_second=rate,
            interval=interval,
            units_per_second=rate * self._units,
            step_seconds=seconds / steps,
            steps=steps,
            seconds=seconds + self._warm_seconds,
            peak_memory_bytes=peak,
            phases=phases,
            train_loss=loss,
            validation_loss=evaluated,
        )


def rate_of(blocks: Sequence[TimedBlock]) -> tuple[float, float]:
    """Samples per second over all blocks, and half the width of its confidence interval as a part of it (infinite for a single
    block). A ratio of two sums, because the last step of an epoch may have fewer samples. Of many blocks neighbours are put together:
    what disturbs one disturbs the next, and an interval from blocks that are alike would be too narrow."""
    while len(blocks) > _MOST_BLOCKS:
        blocks = [_joined(blocks[at : at + 2]) for at in range(0, len(blocks), 2)]
    seconds, samples, number = sum(b.seconds for b in blocks), sum(b.samples for b in blocks), len(blocks)
    rate = samples / seconds
    if number < 2:
        return rate, math.inf
    spread = sum((block.samples - rate * block.seconds) ** 2 for block in blocks) / (number - 1)
    return rate, _student(number - 1) * math.sqrt(spread / number) / (seconds / number) / rate


def _joined(blocks: Sequence[TimedBlock]) -> TimedBlock:
    return TimedBlock(
        sum(b.seconds for b in blocks), sum(b.steps for b in blocks), sum(b.samples for b in blocks)
    )


def _student(degrees: int) -> float:
    """The quantile of Student's t that bounds the middle part of the distribution: exact for one and two degrees of freedom, an
    expansion in powers of 1/n beyond."""
    tail = (1 + _CONFIDENCE) / 2
    if degrees == 1:
        return math.tan(math.pi * (tail - 0.5))
    if degrees == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z, n = NormalDist().inv_cdf(tail), degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))
