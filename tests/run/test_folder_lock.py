"""One process at a time trains into a run folder."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.faults.lock_holder import lock_holder
from orchestrator.errors import UserError
from orchestrator.run.folder_lock import LOCK, check_unlocked, folder_lock


def test_a_second_process_is_refused_with_the_first_one(tmp_path: Path) -> None:
    with lock_holder(tmp_path) as process:
        cause = rf"still going on \(process {process.pid} on .+\); wait for its end"
        with pytest.raises(UserError, match=cause):
            check_unlocked(tmp_path)
        with pytest.raises(UserError, match=cause), folder_lock(tmp_path):
            pass
    assert (tmp_path / LOCK).read_text().startswith(f"process {process.pid} "), "a refusal keeps the owner"


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with lock_holder(tmp_path) as process:
        process.kill()
        process.wait()
        check_unlocked(tmp_path)
        with folder_lock(tmp_path):
            pass


def test_a_folder_without_a_lock_is_not_written(tmp_path: Path) -> None:
    check_unlocked(tmp_path)
    check_unlocked(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_drive_without_locks_is_trained_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with folder_lock(tmp_path):
        pass
    check_unlocked(tmp_path)


def test_a_second_run_in_the_process_is_refused_and_leaves_the_first_one_locked(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with folder_lock(tmp_path):
        for folder in (tmp_path, tmp_path / "link"):
            with pytest.raises(UserError, match=r"still going on \(in this process\)"):
                check_unlocked(folder)
            with pytest.raises(UserError, match="still going on"), folder_lock(folder):
                pass
        with pytest.raises(AssertionError), lock_holder(tmp_path):
            pass
    with lock_holder(tmp_path):
        pass


def test_of_two_threads_that_begin_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses a process no lock that it holds: both would train into the folder."""
    lockf = fcntl.lockf
    refusals: list[str] = []
    second = threading.Thread(target=lambda: take())

    def take() -> None:
        try:
            with folder_lock(tmp_path):
                pass
        except UserError as error:
            refusals.append(str(error))

    def lockf_while_another_begins(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "lockf", lockf)
        second.start()
        second.join(0.2)  # it ends here only if it is not kept waiting
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", lockf_while_another_begins)
    with folder_lock(tmp_path):
        second.join()
    assert len(refusals) == 1
    assert "still going on (in this process)" in refusals[0]
