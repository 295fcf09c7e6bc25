"""Timed training steps: the one definition of warm-up, blocks of steps, median, spread and throughput.

Every time ends when the device has finished (``train/device/timing``). Benches, calibration and
trials build on the functions below.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from scipy.special import stdtrit
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.plan.planning import Plan
from orchestrator.record.files.log import ignore_event
from orchestrator.tasks.task import Task
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.device.clock import PhaseClock, synchronize, timed_seconds
from orchestrator.train.group.world import World
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.placed_experts import PlacedExperts

WARM_UP_STEPS = 4
"""First steps are slower than the rest: caches are cold, the allocator grows, a compiler runs."""
_GPU_BLOCK_STEPS = 4  # in a run the host is ahead of a GPU, so steps are not timed one by one
_MAX_BLOCKS = 16
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class StepRunner:
    """Runs step number n when called, always on the same batch, which stays on the device."""

    stepper: Stepper
    batch: StepBatch

    @property
    def model(self) -> nn.Module:
        return self.stepper.strategy.model

    def __call__(self, step: int) -> Totals:
        return self.stepper.run(self.batch, step)


def build_step_runner(
    config: Config,
    plan: Plan,
    task: Task,
    world: World,
    micro_batch: int,
    host_of: Sequence[Sequence[int]] | None = None,
) -> StepRunner:
    """Build a runner of the plan's accumulation steps; ``micro_batch`` is per worker."""
    experts = PlacedExperts(host_of=host_of, groups=plan.expert_replicas.value)
    parts = build_parts(config, plan, task, world, experts=experts)
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=micro_batch * world.data_ranks * plan.accumulation_steps.value,
        micro_batch=micro_batch,
        seed=0,
        loader=LoaderOptions(),
    )
    stepper = build_stepper(config, world, parts, micro_batch, ignore_event)
    return StepRunner(stepper, _on_device(next(feed.steps(0))))


def _on_device(batch: StepBatch) -> StepBatch:
    """Return the batch with its micro-batches loaded to the device once."""
    loaded = []
    for micro in batch.micro_batches:
        values = micro.fetch()
        loaded.append(replace(micro, fetch=lambda values=values: values))
    return replace(batch, micro_batches=loaded)


@dataclass(frozen=True)
class Summary:
    """The median of several times, and their spread: half the interquartile range."""

    median: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        if len(seconds) < 2:
            return cls(statistics.median(seconds), 0.0)
        lower, _, upper = statistics.quantiles(seconds, n=4)
        return cls(statistics.median(seconds), (upper - lower) / 2)


def block_seconds(run: Callable[[int], Any], steps: Sequence[int], device: torch.device | None) -> float:
    """Run consecutive steps on an idle device; return the seconds until it has finished all of
    them."""

    def run_all() -> None:
        for step in steps:
            run(step)

    return timed_seconds(run_all, device)


def step_seconds(
    run: Callable[[int], Any],
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    device: torch.device | None = None,
) -> list[float]:
    """Return the seconds per step after a warm-up. On a GPU each value is the mean of a block of
    steps."""
    on_gpu = device is not None and device.type == "cuda"
    block_steps = _GPU_BLOCK_STEPS if on_gpu else 1
    block_seconds(run, range(warm_up), device)  # ends with an idle device, as each block must begin
    blocks = [range(first, first + block_steps) for first in range(warm_up, warm_up + steps, block_steps)]
    return [block_seconds(run, block, device) / block_steps for block in blocks]


def submit_seconds(
    run: Callable[[int], Any],
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    device: torch.device | None = None,
) -> list[float]:
    """Return the seconds until the host has submitted each step to an idle GPU, without the GPU's
    own time."""
    seconds = []
    for step in range(warm_up + steps):
        synchronize(device)
        start = perf_counter()
        run(step)
        seconds.append(perf_counter() - start)
    synchronize(device)
    return seconds[warm_up:]


def phase_seconds(
    runner: StepRunner, steps: int, device: torch.device, warm_up: int = WARM_UP_STEPS
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each phase and of the ``total``, by step after a warm-up, and the last
    loss.

    The device is synchronised at the end of each phase: exact phases, at the cost of a slower
    step.
    """
    clock = _SynchronizedClock(device)
    runner.stepper.clock = clock
    loss = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            clock.seconds.clear()
        clock.begin()
        totals = runner(step)
        clock.end()
        loss = float(totals.loss) / float(totals.count)
    return clock.seconds, loss


class _SynchronizedClock(PhaseClock):
    """A phase clock that waits for the device at each mark and keeps the seconds of every step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.seconds: dict[str, list[float]] = {}
        self._step: dict[str, float] = {}

    def begin(self) -> None:
        synchronize(self._device)
        self._step = {}
        super().begin()

    def mark(self, phase: str) -> None:
        synchronize(self._device)
        now = perf_counter()
        self._step[phase] = self._step.get(phase, 0.0) + now - self._last_mark
        self._last_mark = now

    def end(self) -> float:
        synchronize(self._device)
        total = super().end()
        for phase, seconds in (self._step | {"total": total}).items():
            self.seconds.setdefault(phase, []).append(seconds)
        return total


# --- throughput


@dataclass(frozen=True)
class TimedBlock:
    """Consecutive steps that were timed together."""

    seconds: float
    steps: int
    samples: int


def rate_of(blocks: Sequence[TimedBlock]) -> tuple[float, float]:
    """Return samples per second, and half the width of their confidence interval as a share of
    them.

    The rate is a ratio of two sums, because the last step of an epoch may have fewer samples. Of
    many blocks, neighbours are joined: a disturbance lasts longer than one block, and an interval
    from correlated blocks would be too narrow.
    """
    while len(blocks) > _MAX_BLOCKS:
        blocks = [_joined(blocks[first : first + 2]) for first in range(0, len(blocks), 2)]
    seconds = sum(block.seconds for block in blocks)
    samples = sum(block.samples for block in blocks)
    number = len(blocks)
    rate = samples / seconds
    if number < 2:
        return rate, math.inf
    variance = sum((block.samples - rate * block.seconds) ** 2 for block in blocks) / (number - 1)
    quantile = float(stdtrit(number - 1, (1 + _CONFIDENCE) / 2))  # of Student's t
    return rate, quantile * math.sqrt(variance / number) / (seconds / number) / rate


def _joined(blocks: Sequence[TimedBlock]) -> TimedBlock:
    return TimedBlock(
        seconds=sum(block.seconds for block in blocks),
        steps=sum(block.steps for block in blocks),
        samples=sum(block.samples for block in blocks),
    )
