"""Tests of the driver's look at the checkpoints of expert hosts that share no disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from orchestrator.runtime.expert_parallel.run import ExpertParallelRun
from orchestrator.runtime.folder_server import DriverEnd
from orchestrator.storage import folder as storage_folder
from orchestrator.storage.folder import RemoteError, RemoteFolder


def saved_steps(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> list[int]:
    """Return the steps that the driver finds if the first listings of the storage fail."""
    folder = RemoteFolder(f"memory://{uuid4().hex}/run1")
    folder.write("checkpoints/step_00000040/manifest.json", b"{}")
    files = RemoteFolder.files
    left = num_failures

    def fail(self: RemoteFolder) -> dict[str, str]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise RemoteError("the storage is down")
        return files(self)

    monkeypatch.setattr(RemoteFolder, "files", fail)
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)
    run: Any = SimpleNamespace(_assignment=SimpleNamespace(link=DriverEnd(folder.url, None)))
    return ExpertParallelRun._saved_steps(run)


@pytest.mark.parametrize("num_failures", [0, 1, storage_folder.TRIES - 1])
def test_a_listing_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    assert saved_steps(monkeypatch, num_failures) == [40]


def test_a_storage_that_stays_down_has_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, storage_folder.TRIES) == []
