"""The memory of a worker's training state by part, counted from the storages of its tensors.

Counting asks the host alone: it neither waits for the device nor allocates anything there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from experts.moe.gate import Gate
from orchestrator.checkpoint.files import AVERAGE_SLOT
from orchestrator.train.device.batches import tensors_of

_MAX_MEASUREMENTS = 8  # an overflow of fp16 may skip the first updates, and with them the optimizer's state


class StorageCounter:
    """Counts the bytes of tensors on one device, each storage once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of those storages that were not counted before."""
        total = 0
        for tensor in tensors:
            for plain in _plain_tensors(tensor):
                if self._is_here(plain.device):
                    storage = plain.untyped_storage()
                    if storage._cdata not in self._seen:
                        self._seen.add(storage._cdata)
                        total += storage.nbytes()
        return total

    def _is_here(self, device: torch.device) -> bool:
        same_index = self._device.index is None or device.index == self._device.index
        return device.type == self._device.type and (device.type == "cpu" or same_index)


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's data: the shard of a sharded one, for example."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, Tensor):  # a sharded tensor names its device mesh too
            yield from _plain_tensors(inner)


def state_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, copies: Sequence[Tensor], device: torch.device
) -> dict[str, int]:
    """Return the bytes on a device of the state that exists now, by the names of ``MEMORY_PARTS``.

    ``copies`` are kept copies of weights. Sharded parameters count as their shards."""
    gates = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    parameters = [p for p in model.parameters() if id(p) not in gates]
    slots = list(_slots(optimizer))
    counter = StorageCounter(device)
    parts = {
        "parameters": counter.add(parameters),
        "weight_copies": counter.add(copies),
        "gradients": counter.add(_gradients(parameters)),
        "optimizer": counter.add(t for p, slot, t in slots if slot != AVERAGE_SLOT and id(p) not in gates),
        "average": counter.add(t for p, slot, t in slots if slot == AVERAGE_SLOT and id(p) not in gates),
    }
    # Last: where several workers keep gradients in buckets, those of gates lie in the storages of others.
    of_gates = [p for p in model.parameters() if id(p) in gates]
    state_of_gates = [t for p, _, t in slots if id(p) in gates]
    parts["gate"] = counter.add([*of_gates, *_gradients(of_gates), *state_of_gates])
    parts["buffers"] = counter.add(model.buffers())
    return parts


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield the tensors of an optimizer's state, with their parameter and slot."""
    for parameter, state in optimizer.state.items():
        for slot, value in state.items():
            for tensor in tensors_of(value):
                yield parameter, slot, tensor


@dataclass
class StateMemory:
    """The parts of a worker's state at its largest, taken when gradients and optimizer state both exist.

    That is after an update: the gradients are freed when the next step begins."""

    parts: dict[str, int] = field(default_factory=dict)
    _num_left: int = _MAX_MEASUREMENTS

    def after_update(self, measure: Callable[[], dict[str, int]]) -> None:
        """Measure the state after the first update that made optimizer state; later ones cost nothing."""
        if not self._num_left:
            return
        parts = measure()
        self._num_left = 0 if parts["optimizer"] else self._num_left - 1
        if sum(parts.values()) > sum(self.parts.values()):
            self.parts = parts

    def experts_changed(self) -> None:
        """Measure again: there may be more experts now."""
        self._num_left = _MAX_MEASUREMENTS
