"""Copies of loaded batches to the device, beside the computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from orchestrator.train.device.batches import tensors_of, to_device
from orchestrator.train.device.memory import is_out_of_memory


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
