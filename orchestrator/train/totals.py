"""The sums of a step, over its micro-batches and over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.tasks.task import Loss
from orchestrator.train.parts.world import World


@dataclass
class Totals:
    """Sums over the micro-batches of a step, on the device. Nothing here is read by the host until it is logged."""

    loss: Tensor
    count: int | Tensor
    metrics: dict[str, Tensor]
    loads: tuple[Tensor, ...]
    samples: int
    nominal_count: float = 1.0
    norm: Tensor | None = None
    finite: Tensor | None = None
    stop_votes: Tensor | None = None
    """How many workers were asked to stop; None in one process."""
    expert_grad_squares: Tensor | None = None
    """Squared norms of gradients that live on one worker each, over all of them."""
    exchange_stats: Tensor | None = None
    """What the exchange between hosts cost all of them: bytes, rows, seconds."""

    @classmethod
    def from_loss(cls, loss: Loss, weight: float, samples: int, copy: bool) -> Totals:
        """``copy`` where the model's outputs may lie in memory that its next run writes over (compiled graphs)."""
        whole = loss.sum.detach() if weight == 1.0 else loss.sum.detach() * weight
        metrics = {name: value.detach() for name, value in loss.metrics.items()}
        return cls(
            whole,
            loss.count,
            metrics,
            tuple(load.clone() for load in loss.loads) if copy else loss.loads,
            samples,
        )

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.loss + other.loss,
            self.count + other.count,
            {name: value + other.metrics[name] for name, value in self.metrics.items()},
            tuple(mine + theirs for mine, theirs in zip(self.loads, other.loads, strict=True)),
            self.samples + other.samples,
        )


class TotalsReducer:
    """Adds up what the workers counted: one message a step, in fp64, whole numbers exact in it. What it holds is the same
    for all, also for a worker that had no sample to learn it from."""

    def __init__(self, world: World, name: str, squares: int = 0) -> None:
        """``name`` is used once in the life of the group; ``squares`` is how many squared norms travel along."""
        self.world, self.name, self._squares = world, name, squares
        self._metrics: list[str] | None = None
        self._loads: list[int] = []

    def __call__(
        self,
        totals: Totals | None,
        samples: int,
        stop: bool = False,
        squares: Tensor | None = None,
        travel: Sequence[float] = (0.0,) * 3,
    ) -> Totals:
        """The totals of all workers; ``samples`` is known beforehand."""
        if self._metrics is None:
            known = None if totals is None else [list(totals.metrics), [len(load) for load in totals.loads]]
            self._metrics, self._loads = self.world.broadcast_value(self.name, known)
        device = self.world.device
        head = torch.tensor([float(stop), *travel], dtype=torch.float64).to(device)
        tail = head.new_zeros(self._squares) if squares is None else squares
        vector = self.world.all_reduce(torch.cat([head, tail, self._pack(totals, device)]))
        sums = self._unpack(vector[len(head) + self._squares :])
        sums.samples, sums.stop_votes, sums.exchange_stats = samples, vector[0], vector[1 : len(head)]
        sums.expert_grad_squares = vector[len(head) : len(head) + self._squares] if self._squares else None
        return sums

    def _pack(self, totals: Totals | None, device: torch.device) -> Tensor:
        names = self._metrics or []
        if totals is None:
            return torch.zeros(2 + len(names) + sum(self._loads), dtype=torch.float64, device=device)
        if list(totals.metrics) != names:
            raise ValueError(
                f"the loss has metrics {list(totals.metrics)}; it began with {names}: name the same ones for every batch"
            )
        scalars = [totals.loss, totals.count, *totals.metrics.values()]
        parts = [_scalar(value, device) for value in scalars] + [
            load.to(device, torch.float64) for load in totals.loads
        ]
        return torch.cat(parts)

    def _unpack(self, vector: Tensor) -> Totals:
        names = self._metrics or []
        loss, count, *metrics = vector[: 2 + len(names)].unbind()
        loads = (
            tuple(load.to(torch.int64) for load in vector[2 + len(names) :].split(self._loads))
            if self._loads
            else ()
        )
        return Totals(loss, count, dict(zip(names, metrics, strict=True)), loads, 0)


def _scalar(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(1)
    return torch.full((1,), float(value), dtype=torch.float64, device=device)
