"""Steps whose figures are still on the device, and their transfer to the host, several at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.host_copy import to_host
from orchestrator.train.step.totals import Totals, check_metric_names


@dataclass(frozen=True)
class PendingStep:
    """A step whose figures are still on the device."""

    step: int
    epoch: int
    lr: float
    seconds: float
    totals: Totals


@dataclass(frozen=True)
class StepFigures:
    """The sums of one step over the global batch, on the host."""

    loss: float
    norm: float
    count: float
    metrics: dict[str, float]


def fetch_figures(pending: list[PendingStep]) -> list[StepFigures]:
    """Copy the figures of several steps to the host: one transfer, and one kernel per figure."""
    totals = [entry.totals for entry in pending]
    metric_names = list(totals[0].metrics)
    for each in totals:
        check_metric_names(each.metrics, metric_names)
    columns: list[list[Any]] = [[t.loss for t in totals], [t.norm for t in totals]]
    columns += [[t.metrics[name] for t in totals] for name in metric_names]
    # A count is a tensor on the device, or an int that the host knows already.
    counts_on_device = isinstance(totals[0].count, Tensor)
    if counts_on_device:
        columns.append([t.count for t in totals])
    device = totals[0].loss.device
    table = torch.stack([torch.stack(column).to(device, torch.float64) for column in columns])
    figures = []
    for row, total in zip(to_host(table.T).tolist(), totals, strict=True):
        count = row[-1] if counts_on_device else float(total.count)
        metrics = dict(zip(metric_names, row[2:], strict=False))
        figures.append(StepFigures(row[0], row[1], count, metrics))
    return figures
