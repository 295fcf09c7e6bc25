"""Whole training steps on a batch that stays on the device, timed: what predictions are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.plan.planning import Plan
from orchestrator.tasks.task import Task
from orchestrator.train.data import Feed, MicroBatch, StepBatch
from orchestrator.train.loading import LoaderOptions
from orchestrator.train.parts.world import World
from orchestrator.train.step import Stepper
from orchestrator.train.worker.build_model import build_parts, build_stepper


@dataclass(frozen=True)
from orchestrator.train.parts.clock import PhaseClock
from orchestrator.train.parts.timing import synchronize, timed_seconds
class StepRunner:
    """Does step number n when called."""
from orchestrator.train.totals import Totals

    stepper: Stepper
    portion: StepBatch

    @property
    def model(self) -> nn.Module:
        return self.stepper.strategy.model

    def __call__(self, step: int) -> None:
        self.stepper.run(self.portion, step)


def build_steps(
    config: Config,
    chosen: Plan,
    task: Task,
    world: World,
    micro_batch: int,
    host_of: Sequence[Sequence[int]] | None = None,
) -> StepRunner:
    """Steps of as many micro-batches as the plan accumulates; ``micro_batch`` is per worker."""
    parts = build_parts(config, chosen, task, world, host_of=host_of)
    together = micro_batch * world.data_ranks * chosen.accumulation_steps.value
    feed = Feed(
        task.train_data(),
        world,
        global_batch=together,
        micro_batch=micro_batch,
        seed=0,
        loader=LoaderOptions(),
    )
    return StepRunner(
        build_stepper(config, world, parts, micro_batch, lambda *_, **__: None), _kept(next(feed.steps(0)))
    )



def _on_device(batch: StepBatch) -> StepBatch:
    """Return the batch with its micro-batches loaded to the device once."""
    loaded = []
    for micro in batch.micro_batches:
        values = micro.fetch()
        loaded.append(
            MicroBatch(micro.num_samples, lambda values=values: values, micro.first_sample, micro.num_dummies)
        )
    return StepBatch(micros, portion.global_samples, portion.all_have_samples)


def submit_seconds(
    run: Callable[[int], None], steps: int, warm_up: int = 4, device: torch.device | None = None
) -> list[float]:
    """Seconds after which the host has handed each step to a GPU that was idle: not those that the GPU then takes."""
    seconds = []
    for step in range(warm_up + steps):
        torch.cuda.synchronize(device)
        begun = perf_counter()
        run(step)
        seconds.append(perf_counter() - begun)
    torch.cuda.synchronize(device)
    return seconds[warm_up:]


def step_seconds(
    run: Callable[[int], None], steps: int, warm_up: int = 4, device: torch.device | None = None
) -> list[float]:
    """Seconds of each step after some that warm up. On a GPU, where the host runs ahead, four are timed together."""
    on_gpu = device is not None and device.type == "cuda"
    for step in range(warm_up):
        run(step)
    seconds, together = [], 4 if on_gpu else 1
    if on_gpu:
        torch.cuda.synchronize(device)
    for begin in range(warm_up, warm_up + steps, together):
        begun = perf_counter()
        for step in range(begin, begin + together):
            run(step)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append((perf_counter() - begun) / together)
    return seconds
