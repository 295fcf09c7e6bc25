"""Loading of tasks by name."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config.names.nearest import did_you_mean, slips
from orchestrator.config.sections.cross_checks import check_settings_of_task
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.local_copy import local_copy
from orchestrator.tasks.named_object import make_named_object
from orchestrator.tasks.read_settings import watched
from orchestrator.tasks.task import Task

BUILT_IN = {
    "digits": "digits:Digits",
    "text": "text:Text",
    "synthetic": "synthetic:Synthetic",
    "lm": "lm.task:LanguageModel",
}
REQUIRED_MEMBERS = ("build_model", "train_data", "loss")
_OPTIONAL_MEMBERS = (
    "validation_data",
    "build_optimizer",
    "schedule",
    "metrics",
    "units_per_sample",
    "initialise",
)


def load_task(config: Config, earlier: Path | None = None) -> Task:
    """Return the task that the config names, ready to build its model and data.

    ``earlier`` is the folder of the run that is resumed or evaluated, with the files its task has kept."""
    name = config.task
    check_settings_of_task(name, config.model, config.data)
    config, reads = watched(_with_local_data(config))
    task = _make_task(name, config, earlier)
    if getattr(task, "settings_read", None) is None:
        # The class of a user's task may be frozen.
        object.__setattr__(task, "settings_read", reads)
    return task


def _make_task(name: str, config: Config, earlier: Path | None) -> Task:
    if name in BUILT_IN:
        module_name, _, class_name = BUILT_IN[name].partition(":")
        module = importlib.import_module(f"orchestrator.tasks.{module_name}")
        task_class: Any = getattr(module, class_name)
        return task_class(config, earlier) if hasattr(task_class, "keep_files") else task_class(config)
    if ":" not in name:
        raise UserError(
            f"unknown task {name!r}{did_you_mean(name, BUILT_IN)}; built in are {', '.join(BUILT_IN)}; "
            "a task of your own is named package.module:Name"
        )
    return _load_user_task(name, config)


def check_task(task: Any) -> None:
    """Raise UserError unless a given object has the members of a task."""
    if not all(callable(getattr(task, member, None)) for member in REQUIRED_MEMBERS):
        raise UserError(
            f"task is {task!r}; an object with build_model, train_data and loss is needed "
            "(a name goes into Config.of(task=...))"
        )


def _with_local_data(config: Config) -> Config:
    """Return the config with a local copy in place of a remote ``--data-dir``."""
    data_dir = config.data.data_dir
    if data_dir is None or as_url(data_dir) is None:
        return config
    return replace(config, data=replace(config.data, data_dir=local_copy("--data-dir", data_dir)))


def loads_by_name(name: str) -> bool:
    """Return whether a worker can load the task by its name; a task given as a Python object must be sent."""
    return name in BUILT_IN or (":" in name and not name.startswith("python:"))


def _load_user_task(name: str, config: Config) -> Task:
    task = make_named_object("task", name, config)
    missing = [member for member in REQUIRED_MEMBERS if not _defines(task, member)]
    if missing:
        raise UserError(
            f"task {name!r} lacks {', '.join(missing)}; a task needs {', '.join(REQUIRED_MEMBERS)}: "
            "see docs/own-model.md"
        )
    _check_spelling(name, task)
    return task


def _check_spelling(name: str, task: Any) -> None:
    """Raise UserError for a misspelt member of the class: the one it means would keep its default."""
    left_out = [member for member in _OPTIONAL_MEMBERS if not _sets(task, member)]
    for given in dir(type(task)):
        meant = [member for member in left_out if slips(given, member) == 1]
        if meant and not hasattr(Task, given):
            raise UserError(
                f"task {name!r} has {given!r}, which no run uses (did you mean {meant[0]!r}?); rename it"
            )


def _sets(task: Any, member: str) -> bool:
    """Return whether a task has a value of its own for an optional member."""
    value = getattr(task, member, None)
    return value is not None and (
        getattr(type(task), member, None) is not getattr(Task, member, None)
        or member in getattr(task, "__dict__", {})
    )


def _defines(task: Any, member: str) -> bool:
    """Return whether a task defines this member itself; those it inherits from the protocol do nothing."""
    defined = getattr(type(task), member, None) is not getattr(Task, member)
    return defined and callable(getattr(task, member, None))
