"""An exponential moving average of the weights (EMA), kept with the optimizer's state.

So it is in checkpoints and snapshots, moves with an expert from host to host, and is sharded as its
parameter is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.files import AVERAGE_SLOT
from orchestrator.train.optim.shards import local_part


class WeightAverage:
    """The average of each trained weight: ``decay`` × itself + (1 − ``decay``) × the weight, each step.

    It begins with the weights after the first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float, evaluated: bool = False) -> None:
        """``evaluated`` if evaluations are to use the average in place of the weights."""
        self.evaluated = evaluated
        self._optimizer = optimizer
        self._decay = decay

    @torch.no_grad()
    def update(self, stepped: bool = True) -> None:
        """Take over the weights of a step; ``stepped`` is False if the optimizer skipped it."""
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for parameter in self._parameters():
            state = self._optimizer.state[parameter]
            if AVERAGE_SLOT in state:
                # Torch refuses a list of shards and whole tensors, which expert hosts may have.
                averages.append(local_part(state[AVERAGE_SLOT]))
                weights.append(local_part(parameter.detach()))
            elif state or (stepped and parameter.grad is not None):
                # An optimizer may take an empty state for that of a parameter without a step. After a step
                # with a gradient it is empty only where the optimizer keeps none, as SGD.
                state[AVERAGE_SLOT] = parameter.detach().clone()
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self._decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let the model have the average in place of its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def replace_weights(self) -> None:
        """Give the model the average for good, at the end of a run."""
        for parameter in self._parameters():
            average = self._optimizer.state[parameter].get(AVERAGE_SLOT)
            if average is not None:
                parameter.copy_(average)

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter in self._parameters():
            average = self._optimizer.state[parameter].get(AVERAGE_SLOT)
            if average is not None:
                weight = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(weight)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def drop_average(optimizer: torch.optim.Optimizer) -> None:
    """Forget the average that a checkpoint had, in a run that keeps none: it would grow stale."""
    for state in optimizer.state.values():
        state.pop(AVERAGE_SLOT, None)
