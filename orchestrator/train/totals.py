"""The sums of a step, over its micro-batches and over the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.tasks.task import Loss
from orchestrator.train.world import World


@dataclass
class Totals:
    """Sums over the micro-batches of a step, on the device. Nothing here is read by the host until it is logged."""

    loss: Tensor
    count: int | Tensor
    metrics: dict[str, Tensor]
    loads: tuple[Tensor, ...]
    samples: int
    nominal: float = 1.0
    norm: Tensor | None = None
    finite: Tensor | None = None
    stop: Tensor | None = None
    """How many workers were asked to stop; None in one process."""

    @classmethod
    def of(cls, loss: Loss, weight: float, samples: int, copy: bool) -> Totals:
        """``copy`` where the model's outputs may lie in memory that its next run writes over (compiled graphs)."""
        whole = loss.sum.detach() if weight == 1.0 else loss.sum.detach() * weight
        metrics = {name: value.detach() for name, value in loss.metrics.items()}
        return cls(whole, loss.count, metrics, tuple(load.clone() for load in loss.loads) if copy else loss.loads, samples)

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.loss + other.loss,
            self.count + other.count,
            {name: value + other.metrics[name] for name, value in self.metrics.items()},
            tuple(mine + theirs for mine, theirs in zip(self.loads, other.loads, strict=True)),
            self.samples + other.samples,
        )


class Sums:
    """Adds up what the workers counted: one message a step, in fp64, whole numbers exact in it. What it holds is the same
    for all, also for a worker that had no sample to learn it from."""

    def __init__(self, world: World, name: str) -> None:
        """``name`` is used once in the life of the group."""
        self.world, self.name = world, name
        self._metrics: list[str] | None = None
        self._loads: list[int] = []

    def __call__(self, totals: Totals | None, samples: int, stop: bool = False) -> Totals:
        """The totals of all workers; ``samples`` is known beforehand."""
        if self._metrics is None:
            known = None if totals is None else [list(totals.metrics), [len(load) for load in totals.loads]]
            self._metrics, self._loads = self.world.agree(self.name, known)
        sums = self._unpack(self.world.sum_(self._pack(totals, stop)))
        sums.samples = samples
        return sums

    def _pack(self, totals: Totals | None, stop: bool) -> Tensor:
        device, names = self.world.device, self._metrics or []
        asked = torch.full((1,), float(stop), dtype=torch.float64, device=device)
        if totals is None:
            return torch.cat([asked, asked.new_zeros(2 + len(names) + sum(self._loads))])
        if list(totals.metrics) != names:
            raise ValueError(f"the loss has metrics {list(totals.metrics)}; it began with {names}: name the same ones for every batch")
        scalars = [totals.loss, totals.count, *totals.metrics.values()]
        parts = [_scalar(value, device) for value in scalars] + [load.to(device, torch.float64) for load in totals.loads]
        return torch.cat([asked, *parts])

    def _unpack(self, vector: Tensor) -> Totals:
        names = self._metrics or []
        stop, loss, count, *metrics = vector[: 3 + len(names)].unbind()
        loads = tuple(load.to(torch.int64) for load in vector[3 + len(names) :].split(self._loads)) if self._loads else ()
        return Totals(loss, count, dict(zip(names, metrics, strict=True)), loads, 0, stop=stop)


def _scalar(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(1)
    return torch.full((1,), float(value), dtype=torch.float64, device=device)
