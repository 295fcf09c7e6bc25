"""Tests of the end of a run whose workers upload their checkpoints themselves."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from harness.storage.checkpoints import save_checkpoint, small_contents
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import TrainingFailed
from orchestrator.record.events.kinds import Event, Warned
from orchestrator.record.files.log import SilentLog
from orchestrator.storage import folder as storage_folder
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote.mirror import Mirror
from orchestrator.train.remote.run import RemoteRun


class KeptLog(SilentLog):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def write(self, *events: Event) -> None:
        self.messages += [event.message for event in events if isinstance(event, Warned)]


@pytest.fixture
def folder(tmp_path: Path) -> RemoteFolder:
    """A remote folder with the checkpoints of steps 20 and 40."""
    remote = RemoteFolder(f"memory://{uuid4().hex}/run1")
    store = CheckpointStore(tmp_path / "hosts" / "checkpoints")
    for step in (20, 40):
        state = {"progress": vars(Progress(step=step))}
        save_checkpoint(store, step, Contents(small_contents(step).tensors, state))
        uploads = Mirror(tmp_path / "hosts", remote)
        uploads.start(SilentLog(), keep=2)
        uploads.finish_checkpoints()
    return remote


def end_run(folder: RemoteFolder, local: Path, log: KeptLog) -> None:
    """End a run that has no checkpoint on the driver's disk."""
    run = RemoteRun(folder, local, Mirror(local, folder))
    run.mirror.hosts_upload = True
    with run.mirroring(log, keep=2):
        local.mkdir()


def test_the_last_checkpoint_is_downloaded_at_the_end(folder: RemoteFolder, tmp_path: Path) -> None:
    log = KeptLog()
    end_run(folder, tmp_path / "local", log)
    assert (tmp_path / "local" / "checkpoints" / "step_00000040" / "manifest.json").is_file()
    assert log.messages == []


def test_a_damaged_last_checkpoint_is_told(folder: RemoteFolder, tmp_path: Path) -> None:
    """The model of the run is then that of an earlier step."""
    folder.write("checkpoints/step_00000040/state.json", b"damaged")
    log = KeptLog()
    end_run(folder, tmp_path / "local", log)
    (message,) = log.messages
    assert message.startswith("skipped checkpoint step_00000040")
    assert (tmp_path / "local" / "checkpoints" / "step_00000020" / "manifest.json").is_file()


def test_a_last_checkpoint_that_cannot_be_downloaded_fails_the_run_and_says_where_it_is(
    folder: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RemoteError("the storage is down")

    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(RemoteFolder, "download", refuse)
    with pytest.raises(TrainingFailed, match=f"its checkpoints are in {folder.url}.*the storage is down"):
        end_run(folder, tmp_path / "local", KeptLog())
