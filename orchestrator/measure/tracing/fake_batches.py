"""First batches of a task, and the same as fake tensors, which have shapes but no data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from orchestrator.tasks.task import Gatherable, Task
from orchestrator.train.data.steps import as_dataset
from orchestrator.train.device.batches import to_device


@contextmanager
def fake_tensor_mode() -> Iterator[FakeTensorMode]:
    """Create fake tensors inside, without torch's log of operations that cannot be traced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.disabled = before


class TrainingData:
    """The training data of a task for several traces.

    Data in memory is read once. Other data is read for each trace: an iterator may end after the first.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._in_memory: Gatherable | None = None

    def read(self) -> Any:
        if self._in_memory is not None:
            return self._in_memory
        data = as_dataset(self._task.train_data())
        if isinstance(data, Gatherable):
            self._in_memory = data
        return data


def to_fake(mode: FakeTensorMode, batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors replaced by fake ones."""
    if isinstance(batch, Tensor):
        return mode.from_tensor(batch).to(device)
    if isinstance(batch, dict):
        return {key: to_fake(mode, value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [to_fake(mode, value, device) for value in batch]
        is_named_tuple = hasattr(batch, "_fields")
        return type(batch)(*values) if is_named_tuple else type(batch)(values)
    return to_device(batch, device, pin=False)
