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
_MESSAGE_LINES = 5
_HERE = Path(__file__).resolve().parents[1]
_NOT_THEIRS = (str(_HERE), str(_HERE.parent / "experts"), str(Path(importlib.__file__).parent), "<frozen")


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
    parts = module_name.split(".")
    if (
        not attribute.isidentifier()
        or not all(part.isidentifier() for part in parts)
        or (len(parts) > 1 and parts[-1] == "py")
    ):
        raise UserError(
            f"task {name!r} is no name of a task; write package.module:Name, with dots in place of slashes and without .py"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look where it was started
        sys.path.insert(0, here)
    with user_code(f"importing {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise UserError(
                    f"task {name!r}: there is no module {error.name!r} in {here} or among the installed packages"
                ) from None
            raise
    made = getattr(module, attribute, None)
    if made is None:
        names = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise UserError(
            f"task {name!r}: module {module_name} has no {attribute!r}{did_you_mean(attribute, names)}"
        )
    with user_code(f"making the task {attribute}"):
        task = _call(made, config) if callable(made) else made
    missing = [member for member in NEEDED if not _has(task, member)]
    if missing:
        raise UserError(
            f"task {name!r} lacks {', '.join(missing)}; a task needs {', '.join(NEEDED)}: see orchestrator/tasks/task.py"
        )
    return task


def _has(task: Any, member: str) -> bool:
    """Whether a task has written this member itself: what it inherits from the protocol does nothing."""
    return callable(getattr(task, member, None)) and getattr(type(task), member, None) is not getattr(
        Task, member
    )


def _call(made: Any, config: Config) -> Any:
    """A class or function that takes the config, or nothing."""
    try:
        wants = [
            p
            for p in inspect.signature(made).parameters.values()
            if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
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
    except (
        Exception,
        SystemExit,
    ) as error:  # a script that ends itself when imported would end us without a word
        raise TaskFailed(describe(error, doing)) from error


def raised_in_user_code(error: BaseException) -> bool:
    """Whether an error passed through code that is neither ours nor a library's."""
    return bool(_own_frames(error))


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith(_NOT_THEIRS) and "site-packages" not in f.filename]


def _from_worker(text: str, doing: str) -> str | None:
    """The error of a loader process, which torch hands on as text: its cause, and its last frames that are not torch's."""
    if "Original Traceback" not in text:
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    places = [
        n
        for n, line in enumerate(lines)
        if line.lstrip().startswith('File "') and "site-packages" not in line
    ]
    own = [n for n in places if not line_is_ours(lines[n])]
    shown = [f"  {lines[n].strip()}\n    {lines[n + 1].strip()}" for n in own[-3:] if n + 1 < len(lines)]
    return "\n".join([lines[-1].strip(), f"  while {doing}, in a loader process", *shown])


def line_is_ours(line: str) -> bool:
    return any(place in line for place in _NOT_THEIRS)


def describe(error: BaseException, doing: str, frames: int = 6) -> str:
    """The cause first, then the frames of the user's own code, innermost last. At most 20 lines."""
    told = _from_worker(str(error), doing)
    if told is not None:
        return told
    text = str(error).strip()[:1000] or "(no message)"
    shown = text.splitlines()[:_MESSAGE_LINES]
    more = ["  …"] if len(text.splitlines()) > _MESSAGE_LINES else []
    lines = [
        f"{type(error).__name__}: {shown[0]}",
        *(f"  {line}" for line in shown[1:]),
        *more,
        f"  while {doing}",
    ]
    for frame in _own_frames(error)[-frames:]:
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}", f"    {frame.line}"]
    if isinstance(error, SyntaxError) and error.filename:
        lines += [f"  {error.filename}:{error.lineno}", f"    {(error.text or '').strip()}"]
    return "\n".join(lines[:20])
