"""Repeats an action that needs the remote storage, which may not answer for a while."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import TypeVar

from orchestrator.checkpoint.hashed_file import no_progress
from orchestrator.storage.folder import RemoteError

TRIES = 6
_FIRST_WAIT_SECONDS = 1.0
_MAX_WAIT_SECONDS = 60.0

T = TypeVar("T")


def retried(
    action: Callable[[], T],
    on_wait: Callable[[], None] = no_progress,
    errors: type[Exception] = RemoteError,
) -> T:
    """Carry out an action, again after failures: six times in all. Raises its last error.

    ``on_wait`` is called after each of the first failures, and may raise an error of its own. Only
    ``errors`` are worth another try."""
    for num_failures in range(1, TRIES):
        try:
            return action()
        except errors:
            on_wait()
        sleep(wait_seconds(num_failures))
    return action()


def wait_seconds(num_failures: int) -> float:
    """Return how long to wait after so many failures in a row: 1, 2, 4 seconds and so on, up to a minute."""
    return min(_MAX_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (num_failures - 1))
