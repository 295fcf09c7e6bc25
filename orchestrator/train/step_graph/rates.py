"""Learning rates on the device: a graph reads them there, and they change from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from orchestrator.train.optim.optimizer import ScheduledOptimizer


class DeviceRates:
    """A tensor for the learning rate of each group; groups with one rate share it."""

    def __init__(self, optimizer: ScheduledOptimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        peaks = optimizer.peak_rates
        by_peak = {peak: torch.zeros((), device=device) for peak in peaks}
        self._of_group = [by_peak[peak] for peak in peaks]
        self._filled: list[float] = []

    def fill(self) -> None:
        """Take over the rates that the groups have now."""
        rates = [float(group["lr"]) for group in self._optimizer.inner.param_groups]
        if rates != self._filled:
            for tensor, rate in dict(zip(self._of_group, rates, strict=True)).items():
                tensor.fill_(rate)
            self._filled = rates

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the optimizer read the tensors in place of numbers: in the capture of a graph."""
        groups: list[dict[str, Any]] = self._optimizer.inner.param_groups
        names = ("lr", "capturable")
        before = [{name: group[name] for name in names if name in group} for group in groups]
        self._optimizer.keeps_rates = True
        try:
            for group, tensor in zip(groups, self._of_group, strict=True):
                group["lr"] = tensor
                if "capturable" in group:
                    group["capturable"] = True
            yield
        finally:
            self._optimizer.keeps_rates = False
            for group, values in zip(groups, before, strict=True):
                group.update(values)
