"""Training data of a program, divided into a part for training and one for validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.data.adapt import as_source
from orchestrator.data.source import Source
from orchestrator.errors import UserError
from orchestrator.tasks.task import Gatherable, TensorData, as_tensor_data

_HOLD_OUT = 1
"""Keeps the choice of held-out samples apart from other uses of the seed."""


def hold_out(data: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Return data for training and for validation: a share of the samples, chosen by the seed.

    Raises ``UserError`` for data that is read in order, and for a single sample."""
    found = as_tensor_data(data)
    data = found if found is not None else data if isinstance(data, Gatherable | Source) else as_source(data)
    if isinstance(data, Source):
        raise UserError(
            f"validation_share is {share}, but the data is read in order: samples cannot be chosen from it. "
            "Give data with __len__ and __getitem__, or validation=..."
        )
    count = len(data)
    if count < 2:
        raise UserError(f"validation_share is {share}, but the data has {count} samples; 2 were needed")
    order = torch.from_numpy(np.random.default_rng([seed, _HOLD_OUT]).permutation(count))
    num_held_out = min(max(round(share * count), 1), count - 1)
    parts = (order[num_held_out:].sort().values, order[:num_held_out].sort().values)
    kept, held_out = (_part(data, index) for index in parts)
    return kept, held_out


def _part(data: Any, index: Tensor) -> Any:
    if isinstance(data, TensorData):
        return TensorData(*(tensor[index.to(tensor.device)] for tensor in data.tensors))
    return _GatheredPart(data, index) if isinstance(data, Gatherable) else _Part(data, index)


class _Part:
    """Some samples of a data set. Its other members, such as ``collate``, are those of the whole."""

    def __init__(self, data: Any, index: Tensor) -> None:
        self._data = data
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> Any:
        return self._data[int(self._index[number])]

    def __getattr__(self, name: str) -> Any:
        # A copy that is being unpickled has no data yet; samples are fetched by the numbers of this part.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)


class _GatheredPart:
    """Some samples of data that returns a whole batch at once."""

    def __init__(self, data: Gatherable, index: Tensor) -> None:
        self._data = data
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def gather(self, index_B: Tensor) -> Any:
        return self._data.gather(self._index[index_B])

    def to(self, device: torch.device) -> _GatheredPart:
        return _GatheredPart(self._data.to(device), self._index.to(device))

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._index.nbytes
