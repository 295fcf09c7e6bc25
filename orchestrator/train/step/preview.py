"""The passes of a step, and a look at them before they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.moe.context import StepContext
from orchestrator.errors import UserError
from orchestrator.train.data.steps import MicroBatch, StepBatch
from orchestrator.train.device.batches import slice_batch
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World
from orchestrator.train.strategies.base import Strategy


@dataclass(frozen=True)
class Pass:
    """The samples that are computed at once."""

    batch: Any
    size: int
    context: StepContext
    is_last: bool
    """Whether it ends its micro-batch."""


def split_passes(micro_batch: MicroBatch, data: Any, max_samples: int, noise_seed: int) -> Iterator[Pass]:
    """Divide a micro-batch into passes of at most ``max_samples``. Dummy samples are a pass too."""
    dummy = not micro_batch.num_samples
    samples = micro_batch.num_dummies if dummy else micro_batch.num_samples
    for begin in range(0, samples, max_samples):
        end = min(begin + max_samples, samples)
        size = end - begin
        part = data if size == samples else slice_batch(data, begin, end, samples)
        context = StepContext(noise_seed, micro_batch.first_sample + begin, size, dummy)
        yield Pass(part, size, context, end == samples)


def is_single_pass(step: StepBatch, max_samples: int) -> bool:
    """Whether a step has one micro-batch, of at most ``max_samples``."""
    return len(step.micro_batches) == 1 and step.micro_batches[0].num_samples <= max_samples


@dataclass(frozen=True)
class Preview:
    """A ``StepPreview`` of a step on this worker."""

    step: StepBatch
    strategy: Strategy
    world: World
    precision: Precision
    max_pass_samples: int
    noise_seed: int
    seed_micro_batch: Callable[[int], None] = lambda _: None
    """Seeds the draws of a micro-batch by its number, as its training does."""

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    @property
    def is_single_pass(self) -> bool:
        # A choice that must not depend on the workers: with several, each may have a single pass.
        if self.strategy.reproducible:
            return False
        # Only expert hosts wait for each other in a pass; others may have none.
        joint = self.world.size == 1 or self.strategy.context.exchange.size == self.world.size
        return joint and is_single_pass(self.step, self.max_pass_samples)

    def batches(self) -> Iterator[Any]:
        for micro_batch in self.step.micro_batches:
            if micro_batch.num_samples:
                yield micro_batch.fetch()

    @torch.no_grad()
    def forward(self, function: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = []
        for micro_batch in self.step.micro_batches:
            if micro_batch.num_samples or self.strategy.lockstep:
                results += self._results(micro_batch, function)
        return results

    def _results(self, micro_batch: MicroBatch, function: Callable[[Any], Any]) -> Iterator[Any]:
        self.seed_micro_batch(micro_batch.number)
        passes = split_passes(micro_batch, micro_batch.fetch(), self.max_pass_samples, self.noise_seed)
        with nullcontext() if micro_batch.num_samples else self.strategy.dummy_pass():
            for each in passes:
                with self.strategy.context.use_step(each.context), self.precision.autocast():
                    yield function(each.batch)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        own = tensor.to(self.world.device)
        if not (self.strategy.reproducible and own.is_floating_point()):
            return self.world.all_reduce(own)
        _check_whole(own)
        # In fp64 the sums of whole numbers are exact below 2**53, and so in any order.
        return self.world.all_reduce(own.double()).to(own.dtype)


def _check_whole(numbers: Tensor) -> None:
    """Refuse sums of a step that depend on how its micro-batches are divided among the workers."""
    broken = numbers[numbers != numbers.round()]
    if broken.numel():
        raise UserError(
            f"prepare_step of the task adds up {float(broken[0]):.9g} over the workers, and with "
            "--reproducible only whole numbers have the same sum on any number of workers: add up counts, "
            "or multiples of a small step by their numbers, or leave --reproducible out"
        )
