"""The layout of a step's batches: a graph repeats the work of one layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.train.data.steps import StepBatch

_PLAIN = (int, float, str, bool, type(None))


class UnknownLayout(Exception):
    """A batch holds an object whose content a graph would not notice."""


def layout_of_step(batch: StepBatch, data: Sequence[Any], max_pass_samples: int) -> Hashable | None:
    """Return the key of the graph for a step; None if no graph can compute it.

    ``data`` are the batches of its micro-batches."""
    if batch.faults:
        return None
    try:
        layouts = tuple(
            (micro_batch.num_samples, _layout(each))
            for micro_batch, each in zip(batch.micro_batches, data, strict=True)
        )
    except UnknownLayout:
        return None
    has_dummies = any(not num_samples for num_samples, _ in layouts)
    return None if has_dummies else (max_pass_samples, layouts)


def _layout(batch: Any) -> Hashable:
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, dict):
        return tuple((key, _layout(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), *map(_layout, batch)
    # The graph repeats the work for this very value. With its type: 1, 1.0 and True are equal.
    if isinstance(batch, _PLAIN):
        return type(batch), batch
    raise UnknownLayout


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with each tensor replaced."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each tensor into its target. A batch may have none: a task may draw its data on the device."""
    if not targets:
        return
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources, non_blocking=True)
