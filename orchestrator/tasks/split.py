"""The splits of a task's data, which ``orchestrator evaluate --split`` names."""

from __future__ import annotations

from typing import Any

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.errors import UserError
from orchestrator.tasks.task import Task

VALIDATION = "validation"
_SUFFIX = "_data"


class SplitTask:
    """A task whose validation data is another split of it: ``test`` is the data of ``test_data``."""

    def __init__(self, task: Task, split: str) -> None:
        self._task = task
        self._split = split

    def validation_data(self) -> Any:
        return getattr(self._task, f"{self._split}{_SUFFIX}")()

    def __getattr__(self, name: str) -> Any:
        # A copy that is being unpickled has no task yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._task, name)


def with_split(task: Task, split: str) -> Any:
    """Return the task with a split in place of its validation data; UserError for an unknown split."""
    known = splits_of(task)
    if split not in known:
        raise UserError(
            f"--split {split}: the task has no {split}{_SUFFIX}{did_you_mean(split, known)}; "
            f"its splits are {', '.join(known)}"
        )
    return task if split == VALIDATION else SplitTask(task, split)


def splits_of(task: Task) -> list[str]:
    """Return the names of a task's splits: for each a method that ends in ``_data``."""
    names = (name for name in dir(task) if name.endswith(_SUFFIX) and not name.startswith("_"))
    return [name.removesuffix(_SUFFIX) for name in names if callable(getattr(task, name))]
