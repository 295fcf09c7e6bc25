"""Errors of the user's code, shown from its own frames on and without our traceback."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import OrchestratorError, TaskFailed

_MESSAGE_LINES = 5
_WORKER_TRACEBACK = "Original Traceback"  # in errors that torch passes on from a loader process
_WORKER_FRAMES = 3  # shown of an error in a loader process
_ORCHESTRATOR = Path(__file__).resolve().parents[1]
_NOT_USER_CODE = (
    str(_ORCHESTRATOR),
    str(_ORCHESTRATOR.parent / "experts"),
    str(Path(importlib.__file__).parent),
    "<frozen",
)


@contextmanager
def user_code(action: str) -> Iterator[None]:
    """Run code that is not ours; raise its errors as ``TaskFailed``, with the user's frames."""
    try:
        yield
    except OrchestratorError as error:
        raise _without_worker_traceback(error) from None
    # SystemExit too: a script that ends itself when imported would silently end the run.
    except (Exception, SystemExit) as error:
        raise TaskFailed(describe(error, action)) from error


def raised_in_user_code(error: BaseException) -> bool:
    """Return whether an error passed through code that is neither ours nor a library's."""
    return bool(_user_frames(error))


def describe(error: BaseException, action: str, max_frames: int = 6) -> str:
    """Return the cause, then the frames of the user's own code, innermost last; at most 20 lines."""
    from_worker = _describe_worker_error(str(error), action)
    if from_worker is not None:
        return from_worker
    text = str(error).strip()[:1000] or "(no message)"
    message = text.splitlines()
    lines = [
        f"{type(error).__name__}: {message[0]}",
        *(f"  {line}" for line in message[1:_MESSAGE_LINES]),
        *(["  …"] if len(message) > _MESSAGE_LINES else []),
        f"  while {action}",
    ]
    for frame in _user_frames(error)[-max_frames:]:
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}", f"    {frame.line}"]
    if isinstance(error, SyntaxError) and error.filename:
        lines += [f"  {error.filename}:{error.lineno}", f"    {(error.text or '').strip()}"]
    return "\n".join(lines[:20])


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [
        frame
        for frame in frames
        if not frame.filename.startswith(_NOT_USER_CODE) and "site-packages" not in frame.filename
    ]


def _describe_worker_error(text: str, action: str) -> str | None:
    """Return the cause and the last user frames of an error in a loader process, which torch passes on as
    text."""
    if _WORKER_TRACEBACK not in text:
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if _is_user_frame(line)]
    shown = [
        f"  {lines[number].strip()}\n    {lines[number + 1].strip()}"
        for number in frames[-_WORKER_FRAMES:]
        if number + 1 < len(lines)
    ]
    return "\n".join([lines[-1].strip(), f"  while {action}, in a loader process", *shown])


def _without_worker_traceback(error: OrchestratorError) -> OrchestratorError:
    """Return a known error as it was raised, if a loader process passed it on with its traceback."""
    text = str(error).strip()
    if _WORKER_TRACEBACK not in text:
        return error
    message = text.rpartition(f".{type(error).__name__}: ")[2]
    return type(error)(message)


def _is_user_frame(line: str) -> bool:
    """Return whether a line of a printed traceback names a frame of the user's code."""
    if not line.lstrip().startswith('File "') or "site-packages" in line:
        return False
    return not any(place in line for place in _NOT_USER_CODE)
