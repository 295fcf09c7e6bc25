"""An exponential moving average of the weights (EMA), kept with the optimizer's state.

So it is in checkpoints and snapshots, moves with an expert from host to host, and is sharded as its
parameter is. The average of weights that are stored in bf16 is in fp32: its steps are smaller than their last
digit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.files import AVERAGE_SLOT
from orchestrator.train.optim.shards import gathering, is_shard, local_part

_ELEMENTS = 2**26
"""Elements whose differences, or weights in fp32, are in memory at a time, unless a parameter has more."""


class WeightAverage:
    """The average of each trained weight: ``decay`` × itself + (1 − ``decay``) × the weight, each step.

    It begins with the weights after the first step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        decay: float,
        evaluated: bool = False,
        place_free: bool = False,
    ) -> None:
        """``evaluated`` if evaluations are to use the average in place of the weights. With ``place_free``
        the bits of an element depend neither on its place nor on the size of its tensor: fused operations
        may round the last elements of a tensor in another way."""
        self._place_free = place_free
        self.evaluated = evaluated
        self._optimizer = optimizer
        self._decay = decay

    @torch.no_grad()
    def update(self, stepped: bool = True) -> None:
        """Take over the weights of a step; ``stepped`` is False if the optimizer skipped it."""
        for averages, weights in self._slices(stepped):
            if self._place_free:
                steps = torch._foreach_sub(weights, averages)
                torch._foreach_mul_(steps, 1 - self._decay)
                torch._foreach_add_(averages, steps)
            else:
                torch._foreach_lerp_(averages, weights, 1 - self._decay)

    def _slices(self, stepped: bool) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield averages and their weights, some at a time, after a start of those that are missing."""
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        total = 0
        for parameter in self._parameters():
            state = self._optimizer.state[parameter]
            if AVERAGE_SLOT in state:
                # Torch refuses a list of shards and whole tensors, which expert hosts may have.
                averages.append(local_part(state[AVERAGE_SLOT]))
                weights.append(local_part(parameter.detach()).to(averages[-1].dtype))
                total += averages[-1].numel()
            elif state or (stepped and parameter.grad is not None):
                # An optimizer may take an empty state for that of a parameter without a step. After a step
                # with a gradient it is empty only where the optimizer keeps none, as SGD.
                dtype = parameter.grad_dtype or parameter.dtype
                state[AVERAGE_SLOT] = parameter.detach().to(dtype, copy=True)
            if total >= _ELEMENTS:
                yield averages, weights
                averages = []
                weights = []
                total = 0
        if averages:
            yield averages, weights

    @contextmanager
    def in_place_of_weights(self, model: nn.Module) -> Iterator[None]:
        """Let the model have the average in place of its weights, for passes without gradients."""
        in_fp32 = {p: average for p, average in self._averages() if is_shard(p) and _is_longer(p, average)}
        self._swap()
        try:
            with gathering(model, in_fp32):
                yield
        finally:
            self._swap()

    @torch.no_grad()
    def replace_weights(self) -> None:
        """Give the model the average for good, at the end of a run."""
        for parameter, average in self._averages():
            if _is_longer(parameter, average) and not is_shard(parameter):
                parameter.data = average
            else:
                parameter.copy_(average)

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in self._averages():
            if average.dtype == parameter.dtype:
                weight = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(weight)
            elif not is_shard(parameter):
                self._optimizer.state[parameter][AVERAGE_SLOT] = parameter.data
                parameter.data = average

    def _averages(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that have an average, with it."""
        state = self._optimizer.state
        return [(p, state[p][AVERAGE_SLOT]) for p in self._parameters() if AVERAGE_SLOT in state[p]]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def drop_average(optimizer: torch.optim.Optimizer) -> None:
    """Forget the average that a checkpoint had, in a run that keeps none: it would grow stale."""
    for state in optimizer.state.values():
        state.pop(AVERAGE_SLOT, None)


def _is_longer(parameter: nn.Parameter, average: Tensor) -> bool:
    """Whether an average has more digits than its weights, which are stored in bf16."""
    return average.dtype.itemsize > parameter.dtype.itemsize
