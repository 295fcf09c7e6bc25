"""Tests of how errors of the user's code are shown."""

from __future__ import annotations

import pytest

from orchestrator.errors import TaskFailed, UserError
from orchestrator.tasks.user_code import describe, raised_in_user_code, user_code

WORKER_ERROR = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/usr/lib/site-packages/torch/utils/data/_utils/worker.py", line 9, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/mine.py", line 12, in __getitem__
    raise ValueError("image 7 is gone")
ValueError: image 7 is gone
"""


def fail(message: str) -> None:
    raise ZeroDivisionError(message)


def test_an_error_is_shown_with_the_users_frames() -> None:
    with pytest.raises(TaskFailed) as caught, user_code("computing step 3"):
        fail("my own mistake")
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["ZeroDivisionError: my own mistake", "  while computing step 3"]
    assert lines[-2].startswith(f"  {__file__}:")
    assert lines[-2].endswith(" in fail")
    assert lines[-1] == "    raise ZeroDivisionError(message)"


def test_errors_that_are_explained_already_pass_unchanged() -> None:
    error = UserError("choose another batch size")
    with pytest.raises(UserError) as caught, user_code("computing step 3"):
        raise error
    assert caught.value is error


def test_a_long_message_is_cut() -> None:
    error = ValueError("\n".join(f"line {number}" for number in range(9)))
    expected = [
        "ValueError: line 0",
        *(f"  line {number}" for number in range(1, 5)),
        "  …",
        "  while testing",
    ]
    assert describe(error, "testing").splitlines() == expected


def test_an_error_without_a_message_is_named() -> None:
    assert describe(ValueError(), "testing") == "ValueError: (no message)\n  while testing"


def test_an_error_of_a_loader_process_shows_its_cause_and_the_users_frames() -> None:
    assert describe(RuntimeError(WORKER_ERROR), "reading a batch").splitlines() == [
        "ValueError: image 7 is gone",
        "  while reading a batch, in a loader process",
        '  File "/home/me/mine.py", line 12, in __getitem__',
        '    raise ValueError("image 7 is gone")',
    ]


def test_an_error_of_ours_is_not_the_users() -> None:
    from orchestrator.tasks.task import TensorData

    with pytest.raises(ValueError, match="one length") as ours:
        TensorData()
    error = ours.value
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    assert not raised_in_user_code(error.with_traceback(inner)), "only our own frame is left"
    with pytest.raises(ZeroDivisionError) as theirs:
        fail("my own mistake")
    assert raised_in_user_code(theirs.value)
