"""Tests of the tries of an action that needs the remote storage."""

from __future__ import annotations

import pytest

from orchestrator.storage import folder as storage_folder
from orchestrator.storage.folder import TRIES, RemoteError, retried, wait_seconds


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds between the tries, which are not waited for."""
    found: list[float] = []
    monkeypatch.setattr(storage_folder, "sleep", found.append)
    return found


class Storage:
    """Fails so many times before it answers."""

    def __init__(self, num_failures: int, error: Exception) -> None:
        self.num_calls = 0
        self._num_failures = num_failures
        self._error = error

    def __call__(self) -> str:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise self._error
        return "answer"


def test_waits_double_up_to_the_last_try(waits: list[float]) -> None:
    storage = Storage(TRIES - 1, RemoteError("down"))
    assert retried(storage) == "answer"
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert wait_seconds(20) == 60.0


def test_the_last_error_is_raised(waits: list[float]) -> None:
    storage = Storage(TRIES, RemoteError("down"))
    with pytest.raises(RemoteError, match="down"):
        retried(storage)
    assert (storage.num_calls, len(waits)) == (TRIES, TRIES - 1)


def test_an_error_that_does_not_pass_is_raised_at_once(waits: list[float]) -> None:
    storage = Storage(1, ValueError("damaged"))
    with pytest.raises(ValueError, match="damaged"):
        retried(storage)
    assert waits == []
    assert retried(Storage(1, ValueError("damaged")), errors=Exception) == "answer"


def test_waiting_ends_with_the_error_of_the_one_who_waits(waits: list[float]) -> None:
    def leave() -> None:
        raise TimeoutError("the group was left")

    with pytest.raises(TimeoutError, match="the group was left"):
        retried(Storage(1, RemoteError("down")), leave)
    assert waits == []
