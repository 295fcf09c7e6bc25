"""Batches of tensors in any nesting of dicts, lists and tuples: move, slice and check them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from orchestrator.errors import UserError


def to_device(batch: Any, device: torch.device, pin: bool) -> Any:
    """Move a batch to the device without making the host wait; ``pin`` host memory first if it is not."""
    if isinstance(batch, Tensor):
        if batch.device == device or batch.device.type == device.type == "cpu":
            return batch.contiguous()
        source = batch.pin_memory() if pin and device.type == "cuda" else batch
        return source.to(device, non_blocking=True).contiguous()
    if isinstance(batch, dict):
        return {key: to_device(value, device, pin) for key, value in batch.items()}
    if _is_named_tuple(batch):
        return type(batch)(*(to_device(value, device, pin) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, pin) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)


def check_batch_device(batch: Any, device: torch.device) -> None:
    """Raise if a tensor of the batch is not on the model's device."""
    for tensor in tensors_of(batch):
        same_index = device.index is None or tensor.device.index == device.index
        if tensor.device.type != device.type or not same_index:
            raise UserError(
                f"a tensor of the batch is on {tensor.device}; the model is on {device}: "
                "leave the moving of batches to the loop"
            )


def slice_batch(batch: Any, begin: int, end: int, samples: int) -> Any:
    """Return samples ``begin`` to ``end`` of a batch of ``samples``.

    Tensors and lists as long as the batch are sliced; everything else is passed on whole.
    """
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, dict):
        return {key: slice_batch(value, begin, end, samples) for key, value in batch.items()}
    if _is_named_tuple(batch):
        return type(batch)(*(slice_batch(value, begin, end, samples) for value in batch))
    if isinstance(batch, list) and len(batch) == samples and not _is_list_of_fields(batch, samples):
        return batch[begin:end]
    if isinstance(batch, list | tuple):
        return type(batch)(slice_batch(value, begin, end, samples) for value in batch)
    return batch


def _is_named_tuple(batch: Any) -> bool:
    """Return whether a batch is a named tuple, whose constructor takes fields rather than an iterable."""
    return isinstance(batch, tuple) and hasattr(batch, "_fields")


def _is_list_of_fields(batch: list[Any], samples: int) -> bool:
    """Return whether a list as long as the batch holds fields, each a tensor of all samples, not samples."""
    return all(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == samples for value in batch)
