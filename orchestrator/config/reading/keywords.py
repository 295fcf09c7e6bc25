"""Answers unknown keyword arguments of the Python API with the argument or the setting that is meant."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.settings import flat_names, foreign_name_advice
from orchestrator.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_FOREIGN_NAMES = {
    "data": "train_data training_data train_dataset train_dataloader train_dataloaders train_loader dataset",
    "validation": "validation_data val_data valid_data val_dataset eval_dataset eval_data val_dataloaders "
    "val_dataloader val_loader test_data",
    "loss": "loss_fn loss_function criterion compute_loss",
    "optimizer": "optim optimizers",
    "schedule": "scheduler lr_scheduler",
    "metrics": "compute_metrics",
    "config": "args settings",
    "quiet": "verbose",
}
"""Names of other trainers for the parts of a run, by ours."""


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Raise UserError, not TypeError, for a keyword that a constructor does not have."""
    known = list(signature(function).parameters)[1:]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        owner = function.__qualname__.rpartition(".")[0]
        unknown = [
            f"{owner} has no argument {name!r}{_advice(name, value, known)}"
            for name, value in kwargs.items()
            if name not in known
        ]
        if unknown:
            raise UserError("\n".join(unknown))
        return function(*args, **kwargs)

    return call


def _advice(name: str, value: Any, known: list[str]) -> str:
    for ours, foreign in _FOREIGN_NAMES.items():
        if ours in known and name in foreign.split():
            return f" (did you mean {ours!r}?)"
    if name in flat_names():
        return f"; it is a setting: config=Config.of({name}={reprlib.repr(value)})"
    near = did_you_mean(name, known)
    if near:
        return near
    advice = foreign_name_advice(name, value, "python")
    if advice:
        return f"; settings are given in config=Config.of(...): {advice}"
    return f"; it has {', '.join(known)}"
