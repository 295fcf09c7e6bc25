"""A task made of objects of a Python program: a model, data, a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from orchestrator.config.metric import Metric
from orchestrator.data.loaders import read_loader
from orchestrator.errors import UserError
from orchestrator.tasks.held_out import hold_out
from orchestrator.tasks.task import Task


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
