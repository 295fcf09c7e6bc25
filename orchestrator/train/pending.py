"""Steps whose figures are still on the device, and how they are fetched: rarely, and all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.train.totals import Totals


@dataclass(frozen=True)
class StepFigures:
    """A step's sums, on the host."""

    loss: float
    norm: float
    count: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class PendingStep:
    """A step whose figures are still on the device."""

    step: int
    epoch: int
    lr: float
    seconds: float
    totals: Totals


def fetch_figures(pending: list[PendingStep]) -> list[StepFigures]:
    """The figures of several steps in one transfer from the device, and few kernels: one stack per figure."""
    totals = [entry.totals for entry in pending]
    names = list(totals[0].metrics)
    columns: list[list[Any]] = [
        [t.loss for t in totals],
        [t.norm for t in totals],
        *([t.metrics[name] for t in totals] for name in names),
    ]
    on_device = isinstance(totals[0].count, Tensor)
    if on_device:
        columns.append([t.count for t in totals])
    device = totals[0].loss.device
    rows = torch.stack([torch.stack(values).to(device, torch.float64) for values in columns]).T.tolist()
    counts = [row[-1] for row in rows] if on_device else [float(t.count) for t in totals]
    return [
        StepFigures(row[0], row[1], count, dict(zip(names, row[2:], strict=False)))
        for row, count in zip(rows, counts, strict=True)
    ]
