"""Buffers that a forward pass changes: running statistics of norms, and statistics of routing.

A step that is repeated must find them as they were, and one that is skipped leaves them so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experts.balance import gated_layers
from experts.moe.context import MoEContext
from orchestrator.train.strategies.buffers import running_statistics


class StepStatistics:
    """The statistics of a model, with a copy of each to put back."""

    def __init__(self, model: nn.Module, context: MoEContext) -> None:
        layers = [layer for _, layer in gated_layers(model)]
        routing = [b for layer in layers if layer.statistics is not None for b in layer.statistics.of_step]
        self._running = [(buffer.detach().clone(), buffer) for buffer in running_statistics(model)]
        self._routing = [(buffer.clone(), buffer) for buffer in routing]
        self._context = context
        self._is_saved = False

    @property
    def _changing(self) -> list[tuple[Tensor, Tensor]]:
        """Return the copies and the buffers that this step changes."""
        return [*self._running, *self._routing] if self._context.observing else self._running

    def save(self) -> None:
        self._is_saved = True
        for copy, buffer in self._changing:
            copy.copy_(buffer)

    def forget(self) -> None:
        """Begin an attempt that has not saved anything yet."""
        self._is_saved = False

    def restore(self, finite: Tensor | None = None) -> None:
        """Put the statistics back, if this attempt has saved them; with ``finite``, only if that is false."""
        if self._is_saved:
            for copy, buffer in self._changing:
                buffer.copy_(copy if finite is None else torch.where(finite, buffer, copy))
