"""Batches of tensors in any nesting of dicts, lists and tuples: move, slice and check them.

Loaded batches are copied to the device beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from orchestrator.errors import UserError
from orchestrator.train.device.memory import is_out_of_memory


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


@dataclass(frozen=True)
class MoveToDevice:
    """Brings a loaded batch to the device."""

    batch: Any
    device: torch.device

    def __call__(self) -> Any:
        return to_device(self.batch, self.device, pin=False)  # the loader has pinned it


@dataclass(frozen=True)
class _StartedCopy:
    """A batch that is being copied to the device. A call lets the current stream wait, not the host."""

    batch: Any
    copied: Any
    """The event of its end."""
    device: torch.device

    def __call__(self) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.copied)
        for tensor in tensors_of(self.batch):
            # The memory belongs to the stream of the copy, which must not reuse it before this one is done.
            tensor.record_stream(current)
        return self.batch


def start_copy(batch: Any, device: torch.device) -> Callable[[], Any]:
    """Start the copy of a loaded batch to a GPU, on a stream of its own; return a function that fetches it.

    Without memory for it, the batch is copied when it is fetched: a step can recover there."""
    # A tensor on a GPU may still be computed, on a stream that the stream of the copy does not wait for.
    is_on_host = all(tensor.device.type == "cpu" for tensor in tensors_of(batch))
    if device.type != "cuda" or not is_on_host or not _shows_its_tensors(batch):
        return MoveToDevice(batch, device)
    stream = _copy_stream(device)
    try:
        with torch.cuda.stream(stream):
            moved = to_device(batch, device, pin=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return MoveToDevice(batch, device)
    return _StartedCopy(moved, stream.record_event(), device)


def _shows_its_tensors(batch: Any) -> bool:
    """Return whether ``tensors_of`` finds all tensors of a batch: objects of other classes may hold some."""
    if isinstance(batch, dict):
        return all(map(_shows_its_tensors, batch.values()))
    if isinstance(batch, list | tuple):
        return all(map(_shows_its_tensors, batch))
    return isinstance(batch, torch.Tensor) or not hasattr(batch, "to")


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
