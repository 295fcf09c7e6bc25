"""A task made of objects of a Python program: a model, data, a loss.

Its data may be divided into a part for training and one for validation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from orchestrator.config.metric import Metric
from orchestrator.data.adapt import as_source
from orchestrator.data.loaders import read_loader
from orchestrator.data.source import Source
from orchestrator.errors import UserError
from orchestrator.tasks.task import Gatherable, Task, TensorData, as_tensor_data


class ObjectTask(Task):
    """Task of a given model. Each ``build_model`` returns a copy, so tracing and probing leave the
    model as it is."""

    def __init__(
        self,
        model: Any,
        data: Any,
        loss: Callable[[Any, Any], Any],
        validation: Any = None,
        optimizer: Callable[[Iterable[Any]], Any] | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        self._model = model
        self.settings_read = ("validation_share",)
        self._data = _picklable(data)
        self._loss = loss
        self._validation = _picklable(validation)
        self._optimizer = optimizer
        self._schedule = schedule
        self.metrics: Mapping[str, Metric] = {}

    def with_held_out(self, share: float | None, seed: int) -> ObjectTask:
        """Return the task with a share of its training data for validation; itself without a share."""
        if not share:
            return self
        if self._validation is not None:
            raise UserError(
                f"validation_share is {share}, and validation data is given too; leave one of them out"
            )
        task = copy.copy(self)
        task._data, task._validation = hold_out(self._data, share, seed)
        return task

    def build_model(self) -> Any:
        return copy.deepcopy(self._model)

    def train_data(self) -> Any:
        return self._data

    def validation_data(self) -> Any:
        return self._validation

    def loss(self, model: Any, batch: Any) -> Any:
        return self._loss(model, batch)

    def build_optimizer(self, parameters: Iterable[Any]) -> Any:
        return self._optimizer(parameters) if self._optimizer else None

    def schedule(self) -> Any:
        return self._schedule


def check_parts(optimizer: Any, schedule: Any) -> None:
    """Raise UserError for an optimizer or schedule that is no function: a name, or an object made already."""
    if optimizer is not None and not callable(optimizer):
        raise UserError(
            f"optimizer is {_shown(optimizer)}; a function of the parameters is needed, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1), "
            "or a name in the settings: Config.of(optimizer='sgd')"
        )
    if schedule is not None and not callable(schedule):
        raise UserError(
            f"schedule is {_shown(schedule)}; a function from the step to a factor of the learning rate is "
            "needed, such as lambda step: 0.99**step, or a name in the settings: Config.of(schedule='wsd')"
        )


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"


def _picklable(data: Any) -> Any:
    """Return data that can be sent to workers: a loader that has been iterated over cannot."""
    return read_loader(data) if isinstance(data, DataLoader) else data


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
