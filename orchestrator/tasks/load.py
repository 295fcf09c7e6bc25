"""Loading of tasks by name.

User code is imported only if the user named it on the command line or in the config.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.config.nearest import did_you_mean
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.task import Task
from orchestrator.tasks.user_code import user_code

BUILT_IN = {"digits": "Digits", "text": "Text", "synthetic": "Synthetic"}
REQUIRED_MEMBERS = ("build_model", "train_data", "loss")


def load_task(config: Config) -> Task:
    """Return the task that the config names, ready to build its model and data."""
    name = config.task
    if name in BUILT_IN:
        module = importlib.import_module(f"orchestrator.tasks.{name}")
        return getattr(module, BUILT_IN[name])(config)
    if ":" not in name:
        raise UserError(
            f"unknown task {name!r}{did_you_mean(name, BUILT_IN)}; built in are {', '.join(BUILT_IN)}; "
            "a task of your own is named package.module:Name"
        )
    return _load_user_task(name, config)


def loads_by_name(name: str) -> bool:
    """Return whether a worker can load the task by its name; a task given as a Python object must be sent."""
    return name in BUILT_IN or (":" in name and not name.startswith("python:"))


def _load_user_task(name: str, config: Config) -> Task:
    module_name, _, attribute = name.partition(":")
    parts = module_name.split(".")
    is_path = len(parts) > 1 and parts[-1] == "py"
    if is_path or not all(part.isidentifier() for part in [attribute, *parts]):
        raise UserError(
            f"task {name!r} is no name of a task; write package.module:Name, with dots in place of slashes "
            "and without .py"
        )
    module = _import_user_module(name, module_name)
    factory = getattr(module, attribute, None)
    if factory is None:
        classes = [known for known, value in vars(module).items() if inspect.isclass(value)]
        raise UserError(
            f"task {name!r}: module {module_name} has no {attribute!r}{did_you_mean(attribute, classes)}"
        )
    with user_code(f"making the task {attribute}"):
        task = _call_factory(factory, config) if callable(factory) else factory
    missing = [member for member in REQUIRED_MEMBERS if not _defines(task, member)]
    if missing:
        raise UserError(
            f"task {name!r} lacks {', '.join(missing)}; a task needs {', '.join(REQUIRED_MEMBERS)}: "
            "see orchestrator/tasks/task.py"
        )
    return task


def _import_user_module(name: str, module_name: str) -> ModuleType:
    folder = str(Path.cwd())
    # Python does not search the current folder when it runs a console script.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with user_code(f"importing {module_name}"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # Modules that the user's own module lacks are errors of the user's code, and shown as such.
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise UserError(
                    f"task {name!r}: there is no module {error.name!r} in {folder} or among the installed "
                    "packages"
                ) from None
            raise


def _defines(task: Any, member: str) -> bool:
    """Return whether a task defines this member itself; those it inherits from the protocol do nothing."""
    defined = getattr(type(task), member, None) is not getattr(Task, member)
    return defined and callable(getattr(task, member, None))


def _call_factory(factory: Any, config: Config) -> Any:
    """Call a class or function with the config if it has a required parameter, else with nothing."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return factory()
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    return factory(config) if required else factory()
