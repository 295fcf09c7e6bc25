"""Sums of a step over its micro-batches and over the workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from orchestrator.errors import UserError
from orchestrator.tasks.task import Loss
from orchestrator.train.group.requests import NO_VOTES
from orchestrator.train.group.world import World


@dataclass
class Totals:
    """Sums over the micro-batches of a step, on the device.

    The host reads nothing here until it is logged.
    """

    loss: Tensor
    count: int | Tensor
    metrics: dict[str, Tensor]
    loads: tuple[Tensor, ...]
    samples: int
    nominal_count: float = 1.0
    """The power of two near the count, by which gradients are divided until the exact count is known."""
    norm: Tensor | None = None
    finite: Tensor | None = None
    votes: Tensor | None = None
    """Sums of further numbers of the workers, such as votes for each kind of request; None in one process."""
    expert_grad_squares: Tensor | None = None
    """Squared norms of gradients that live on one worker each, of all workers."""
    exchange_stats: Tensor | None = None
    """Bytes, rows and seconds of the token exchange, summed over the hosts."""
    parts: tuple[tuple[int, Totals], ...] = ()
    """The totals of each micro-batch by its number, where they are summed in the order of micro-batches."""

    @classmethod
    def from_loss(cls, loss: Loss, weight: float, samples: int, copy: bool) -> Totals:
        """``copy`` if the next pass may overwrite the model's outputs, as compiled graphs do."""
        detached = loss.sum.detach()
        return cls(
            loss=detached if weight == 1.0 else detached * weight,
            count=loss.count,
            metrics={name: value.detach() for name, value in loss.metrics.items()},
            loads=tuple(load.clone() for load in loss.loads) if copy else loss.loads,
            samples=samples,
        )

    def zeroed(self) -> Totals:
        """Return zeros with the same metrics and experts: the totals of dummy samples."""
        return Totals(
            loss=torch.zeros_like(self.loss),
            count=torch.zeros_like(self.count) if isinstance(self.count, Tensor) else 0,
            metrics={name: torch.zeros_like(value) for name, value in self.metrics.items()},
            loads=tuple(torch.zeros_like(load) for load in self.loads),
            samples=0,
        )

    def plus(self, other: Totals) -> Totals:
        """Add the sums of another micro-batch."""
        check_metric_names(other.metrics, self.metrics)
        return Totals(
            loss=self.loss + other.loss,
            count=self.count + other.count,
            metrics={name: value + other.metrics[name] for name, value in self.metrics.items()},
            loads=tuple(a + b for a, b in zip(self.loads, other.loads, strict=True)),
            samples=self.samples + other.samples,
            parts=(*self.parts, *other.parts),
        )

    def numbered(self, number: int) -> Totals:
        """Return these totals of one micro-batch with its number, for sums in their order."""
        return replace(self, parts=((number, self),))


@dataclass(frozen=True)
class PackedTotals:
    """The totals of a step in one process, in two vectors that the next step overwrites."""

    figures: Tensor
    """Loss, norm, metrics, and the count if it is on the device; fp64."""
    loads: Tensor | None
    source: Totals
    """The totals before they were packed, for the values that the host knows."""

    @classmethod
    def of(cls, totals: Totals) -> PackedTotals:
        assert totals.norm is not None
        figures = [totals.loss, totals.norm, *totals.metrics.values()]
        if isinstance(totals.count, Tensor):
            figures.append(totals.count)
        device = totals.loss.device
        packed = torch.cat([_as_vector(value, device) for value in figures])
        return cls(packed, torch.cat(totals.loads) if totals.loads else None, totals)

    def copied(self) -> Totals:
        """Return totals that stay: a copy of each vector, and its parts."""
        source = self.source
        loss, norm, *rest = self.figures.clone().unbind()
        count = rest.pop() if isinstance(source.count, Tensor) else source.count
        loads: tuple[Tensor, ...] = ()
        if self.loads is not None:
            loads = self.loads.clone().split([len(load) for load in source.loads])
        metrics = dict(zip(source.metrics, rest, strict=True))
        return Totals(loss, count, metrics, loads, source.samples, source.nominal_count, norm)


class TotalsReducer:
    """Sums the totals of all workers in one all-reduce per step, in fp64, where whole numbers are exact.

    The workers agree once on the names of metrics and the number of experts, so that a worker without
    samples can take part too.
    """

    def __init__(self, world: World, name: str, num_squares: int = 0) -> None:
        """``name`` is used once per generation of the group; ``num_squares`` squared norms are summed
        too."""
        self.world = world
        self.name = name
        self._num_squares = num_squares
        self._num_layouts = 0
        self._metrics: list[str] | None = None
        self._num_experts: list[int] = []

    def experts_changed(self, num_squares: int = 0) -> None:
        """Let the workers agree anew on the number of experts."""
        self._num_squares = num_squares
        self._num_layouts += 1
        self._metrics = None

    def __call__(
        self,
        totals: Totals | None,
        samples: int,
        votes: Sequence[float] = NO_VOTES,
        expert_grad_squares: Tensor | None = None,
        exchange_stats: Sequence[float] = (0.0, 0.0, 0.0),
        num_parts: int = 0,
    ) -> Totals:
        """Return the totals of all workers. ``totals`` is None on a worker without samples.

        With ``num_parts`` micro-batches of all workers, figures are summed in the order of these."""
        if self._metrics is None:
            layout = None
            if totals is not None:
                layout = [list(totals.metrics), [len(load) for load in totals.loads]]
            name = f"{self.name}/{self._num_layouts}"
            self._metrics, self._num_experts = self.world.broadcast_value(name, layout)
        device = self.world.device
        # One vector: requests and exchange statistics, squared norms, then the sums themselves.
        head = _to_device([*votes, *exchange_stats], device)
        squares = head.new_zeros(self._num_squares) if expert_grad_squares is None else expert_grad_squares
        loads = self._pack_loads(totals, device)
        parts = self._pack_parts(totals, num_parts, device)
        vector = self.world.all_reduce(torch.cat([head, squares, loads, parts.flatten()]))
        squares_end = len(head) + self._num_squares
        loads, parts = vector[squares_end:].split([len(loads), parts.numel()])
        result = self._unpack(loads, parts.view(num_parts, -1).sum(0) if num_parts else parts)
        result.samples = samples
        result.votes = vector[: len(votes)]
        result.exchange_stats = vector[len(votes) : len(head)]
        result.expert_grad_squares = vector[len(head) : squares_end] if self._num_squares else None
        return result

    def _pack_loads(self, totals: Totals | None, device: torch.device) -> Tensor:
        if totals is None or not totals.loads:
            return torch.zeros(sum(self._num_experts), dtype=torch.float64, device=device)
        return torch.cat([load.to(device, torch.float64) for load in totals.loads])

    def _pack_parts(self, totals: Totals | None, num_parts: int, device: torch.device) -> Tensor:
        """Return a row for each micro-batch, which one worker fills in; else one that all add to."""
        if totals is not None and not num_parts:
            return self._figures(totals, device).unsqueeze(0)
        shape = (max(1, num_parts), 2 + len(self._metrics or []))
        figures = torch.zeros(shape, dtype=torch.float64, device=device)
        for number, part in () if totals is None else totals.parts:
            figures[number] = self._figures(part, device)
        return figures

    def _figures(self, totals: Totals, device: torch.device) -> Tensor:
        names = self._metrics or []
        check_metric_names(totals.metrics, names)
        # In the order of all workers: a loss may name its metrics in another one.
        scalars = [totals.loss, totals.count, *(totals.metrics[name] for name in names)]
        return torch.cat([_as_vector(value, device) for value in scalars])

    def _unpack(self, loads: Tensor, figures: Tensor) -> Totals:
        loss, count, *metrics = figures.unbind()
        by_layer: tuple[Tensor, ...] = ()
        if self._num_experts:
            by_layer = tuple(load.to(torch.int64) for load in loads.split(self._num_experts))
        named = dict(zip(self._metrics or [], metrics, strict=True))
        return Totals(loss, count, named, by_layer, samples=0)


def check_metric_names(found: Collection[str], first: Collection[str]) -> None:
    """Refuse a loss whose metrics are others than those of an earlier batch: they are summed by name."""
    if set(found) != set(first):
        raise UserError(
            f"the task's loss has the metrics {_listed(found)} for a batch, and had {_listed(first)} for an "
            "earlier one; return the same names for every batch, with zeros where there is nothing to count"
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"


def _to_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers of the host on the device, in fp64, without waiting for it."""
    on_gpu = device.type == "cuda"
    vector = torch.tensor(values, dtype=torch.float64, pin_memory=on_gpu)
    return vector.to(device, non_blocking=on_gpu)


def _as_vector(value: Any, device: torch.device) -> Tensor:
    """Return a scalar as a vector of one element, in fp64."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(1)
    return torch.full((1,), float(value), dtype=torch.float64, device=device)
