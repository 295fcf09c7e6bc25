"""From a name to a task. User code is imported only because the user named it on the command line or in their config."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.config.settings import Config, did_you_mean
from orchestrator.errors import OrchestratorError, TaskFailed, UserError
from orchestrator.tasks.task import Task

BUILT_IN = {"digits": "Digits", "text": "Text", "synthetic": "Synthetic"}
NEEDED = ("build_model", "train_data", "loss")


def load_task(config: Config) -> Task:
    """The task that the config names, ready to build its model and data."""
    name = config.task
    if name in BUILT_IN:
        module = importlib.import_module(f"orchestrator.tasks.{name}")
        return getattr(module, BUILT_IN[name])(config)
    if ":" not in name:
        raise UserError(
            f"unknown task {name!r}{did_you_mean(name, BUILT_IN)}; built in are {', '.join(BUILT_IN)}; "
            "a task of your own is named package.module:Name"
        )
    return _user_task(name, config)


def _user_task(name: str, config: Config) -> Task:
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look where it was started
        sys.path.insert(0, here)
    with user_code(f"importing {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise UserError(f"task {name!r}: there is no module {error.name!r} in {here} or among the installed packages") from None
            raise
    made = getattr(module, attribute, None)
    if made is None:
        names = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise UserError(f"task {name!r}: module {module_name} has no {attribute!r}{did_you_mean(attribute, names)}")
    with user_code(f"making the task {attribute}"):
        task = _call(made, config) if callable(made) else made
    missing = [member for member in NEEDED if not callable(getattr(task, member, None))]
    if missing:
        raise UserError(f"task {name!r} lacks {', '.join(missing)}; a task needs {', '.join(NEEDED)}: see orchestrator/tasks/task.py")
    return task


def _call(made: Any, config: Config) -> Any:
    """A class or function that takes the config, or nothing."""
    try:
        wants = [p for p in inspect.signature(made).parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        wants = []
    return made(config) if wants else made()


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Around code that is not ours: what it raises is shown from its own frame on, without our traceback."""
    try:
        yield
    except OrchestratorError:
        raise
    except Exception as error:
        raise TaskFailed(describe(error, doing)) from error


def describe(error: BaseException, doing: str, frames: int = 6) -> str:
    """The cause first, then the frames of the user's own code, innermost last."""
    ours = str(Path(__file__).resolve().parents[1])
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((ours, "<frozen")) and "site-packages" not in f.filename
    ]
    lines = [f"{type(error).__name__}: {str(error).strip()[:1000] or '(no message)'}", f"  while {doing}"]
    for frame in own[-frames:]:
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}", f"    {frame.line}"]
    return "\n".join(lines[:20])
