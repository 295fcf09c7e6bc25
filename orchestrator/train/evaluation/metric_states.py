"""Metrics with a state during one evaluation, and the reduction of their states over the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orchestrator.config.metric import Metric, missing_update, undeclared_update
from orchestrator.errors import UserError
from orchestrator.tasks.user_code import user_code
from orchestrator.train.group.world import World

_SUMMED_TYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
"""Types that every backend sums; rows of others travel as one of these that holds their values."""


class MetricStates:
    """The metrics with a state of a task, from the start of an evaluation to its end."""

    def __init__(self, declared: Mapping[str, Metric], device: torch.device) -> None:
        self.device = device
        self._metrics = {name: metric.fresh(device) for name, metric in declared.items() if metric.has_state}
        self._num_updates = dict.fromkeys(self._metrics, 0)

    def update(self, updates: Mapping[str, tuple[Any, ...]]) -> None:
        """Update the metrics with the values of a batch."""
        for name, values in updates.items():
            if name not in self._metrics:
                raise UserError(undeclared_update(name))
            self._num_updates[name] += 1
            with user_code(f"updating the metric {name}"):
                self._metrics[name].update(*values)

    def compute(self, world: World) -> dict[str, float]:
        """Return the metrics over the samples of all workers, equal on all of them."""
        if not self._metrics:
            return {}
        self._check_updated(world)
        for metric in self._metrics.values():
            for name, reduction in metric.reductions.items():
                state = metric.state(name)
                is_sum = reduction == "sum"
                total = _sum(state, metric.start_of(name), world) if is_sum else _gather(state, world)
                metric.set_state(name, total)
        values = [self._value(name, metric) for name, metric in self._metrics.items()]
        # All decide by the main worker's value: the same state may round differently on another GPU.
        shared = torch.tensor(values if world.is_main else [0.0] * len(values), dtype=torch.float64)
        return dict(zip(self._metrics, world.all_reduce(shared).tolist(), strict=True))

    def _check_updated(self, world: World) -> None:
        counts = world.all_reduce_max(list(self._num_updates.values()))
        for name, count in zip(self._metrics, counts, strict=True):
            if not count:
                raise UserError(missing_update(name))

    def _value(self, name: str, metric: Metric) -> float:
        with user_code(f"computing the metric {name}"):
            value = metric.compute()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            # RuntimeError is that of a tensor with several elements.
            raise UserError(
                f"compute of the metric {name!r} returned {_described(value)}; one number was needed"
            ) from None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _sum(state: Tensor, start: Tensor, world: World) -> Tensor:
    """Sum a state over the workers, in fp64, where counts are exact.

    Every worker began with ``start``, which counts once."""
    if world.size == 1:
        return state
    begin = start.to(world.device, torch.float64)
    added = state.detach().to(world.device, torch.float64) - begin
    total = begin + world.all_reduce(added)
    return total.to(state.dtype)


def _gather(state: Any, world: World) -> Tensor:
    """Return the rows that all workers have collected, by rank."""
    pieces = [state] if isinstance(state, Tensor) else list(state)
    own = torch.cat([torch.atleast_1d(piece.detach()) for piece in pieces]) if pieces else None
    layout = None if own is None else [len(own), list(own.shape[1:]), str(own.dtype).removeprefix("torch.")]
    layouts = world.gather_values(layout)
    known = next((found for found in layouts if found is not None), None)
    if known is None:
        return torch.zeros(0, device=world.device)
    if world.size == 1:
        assert own is not None
        return own
    _, shape, dtype_name = known
    dtype = getattr(torch, dtype_name)
    counts = [found[0] if found is not None else 0 for found in layouts]
    # Each worker fills its own part; the sum over the workers has every part.
    sent_type = dtype if dtype in _SUMMED_TYPES else torch.float32 if dtype.is_floating_point else torch.int64
    rows = torch.zeros(sum(counts), *shape, dtype=sent_type, device=world.device)
    begin = sum(counts[: world.rank])
    if own is not None:
        rows[begin : begin + len(own)] = own.to(world.device, sent_type)
    return world.all_reduce(rows).to(dtype)
