"""Metrics with a state during one evaluation, and the reduction of their states over the workers."""

from __future__ import annotations

import math
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

    def __init__(self, declared: Mapping[str, Metric], device: torch.device, exactly: bool = False) -> None:
        """With ``exactly`` no bit depends on the worker that computes a batch: each one starts anew."""
        self.device = device
        self._metrics = {name: metric.fresh(device) for name, metric in declared.items() if metric.has_state}
        self._num_updates = dict.fromkeys(self._metrics, 0)
        self._exact = ExactStates() if exactly else None

    def update(self, updates: Mapping[str, tuple[Any, ...]], number: int = 0) -> None:
        """Update the metrics with the values of a batch. ``number`` is its place in the whole evaluation."""
        for name, values in updates.items():
            if name not in self._metrics:
                raise UserError(undeclared_update(name))
            self._num_updates[name] += 1
            with user_code(f"updating the metric {name}"):
                self._metrics[name].update(*values)
            if self._exact is not None:
                self._exact.take(name, self._metrics[name], number)

    def compute(self, world: World) -> dict[str, float]:
        """Return the metrics over the samples of all workers, equal on all of them."""
        if not self._metrics:
            return {}
        self._check_updated(world)
        for metric_name, metric in self._metrics.items():
            for name, reduction in metric.reductions.items():
                if self._exact is not None:
                    total = self._exact.reduced(metric_name, metric, name, world)
                elif reduction == "sum":
                    total = _sum(metric.state(name), metric.start_of(name), world)
                else:
                    total = _gather(metric.state(name), world)
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


class ExactStates:
    """The states of metrics after each batch by itself.

    Sums are added up as integers, relative to the largest value, and rows are gathered in the order of
    batches: neither depends on the workers that have computed them."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}

    def take(self, metric_name: str, metric: Metric, number: int) -> None:
        """Take what a batch has added to the states of a metric, which begin anew."""
        for name, reduction in metric.reductions.items():
            state = metric.state(name)
            pieces = self._pieces.setdefault((metric_name, name), [])
            if reduction == "sum":
                start = metric.start_of(name).to(state.device)
                pieces.append((number, state.detach().double() - start.double()))
                metric.set_state(name, start.clone())
            else:
                pieces += [(number, torch.atleast_1d(rows.detach())) for rows in _rows(state)]
                metric.set_state(name, [])

    def reduced(self, metric_name: str, metric: Metric, name: str, world: World) -> Tensor:
        """Return a state over the batches of all workers."""
        pieces = self._pieces.get((metric_name, name), [])
        if metric.reductions[name] == "gather":
            numbers = [torch.full((len(rows),), number) for number, rows in pieces]
            rows = _gather([rows for _, rows in pieces], world)
            order = _gather(numbers, world).argsort(stable=True)
            return rows[order.to(rows.device)]
        start = metric.start_of(name)
        total = _exact_sum([piece for _, piece in pieces], start.shape, world)
        return (start.to(total) + total).to(start.dtype)


def _rows(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def _exact_sum(pieces: list[Tensor], shape: torch.Size, world: World) -> Tensor:
    """Return the sum of the pieces of all workers in fp64, with the same bits in any order."""
    own_largest = max((float(piece.abs().amax()) for piece in pieces if piece.numel()), default=0.0)
    # Infinity for NaN, which may get lost in a maximum.
    own_largest = own_largest if math.isfinite(own_largest) else math.inf
    (largest,) = world.all_reduce_max([own_largest])
    num_pieces = int(world.all_reduce(torch.tensor([len(pieces)])))
    total = torch.zeros(shape, dtype=torch.int64, device=world.device)
    if math.isinf(largest):
        return torch.full_like(total, torch.nan, dtype=torch.float64)
    # All pieces together stay below 2**62. Whole numbers below 2**40 are exact.
    exponent = min(1000, 62 - math.frexp(largest)[1] - num_pieces.bit_length())
    for piece in pieces:
        total += (piece.to(world.device) * 2.0**exponent).round().to(torch.int64)
    return world.all_reduce(total).double() * 2.0**-exponent


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
    pieces = _rows(state)
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
