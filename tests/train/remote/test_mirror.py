"""Tests of the mirror: the order of its uploads, what it leaves out, and what it says."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.storage.checkpoints import save_checkpoint, small_contents
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import TrainingFailed
from orchestrator.record.events import kinds
from orchestrator.record.files.log import SilentLog
from orchestrator.storage import folder as storage_folder
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote import mirror
from orchestrator.train.remote.checkpoints import RemoteCheckpoints
from orchestrator.train.remote.mirror import Mirror

WAIT_S = 60.0


class CheckedLog(SilentLog):
    """Keeps the steps of ``upload`` events, with those that were published when each was written."""

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder = folder
        self.uploads: list[tuple[int, list[int]]] = []
        self.changed = threading.Condition()

    def write(self, *events: kinds.Event) -> None:
        for event in events:
            if isinstance(event, kinds.Upload):
                with self.changed:
                    self.uploads.append((event.step, published(self._folder)))
                    self.changed.notify_all()

    def wait_for(self, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: step in self.steps, WAIT_S)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.uploads]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 0.01)


@pytest.fixture
def folder() -> RemoteFolder:
    return RemoteFolder(f"memory://{uuid4().hex}/run1")


@pytest.fixture
def log(folder: RemoteFolder) -> CheckedLog:
    return CheckedLog(folder)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=1)


def published(folder: RemoteFolder) -> list[int]:
    return [checkpoint.step for checkpoint in RemoteCheckpoints(folder / "checkpoints").newest_first()]


def save(store: CheckpointStore, step: int, best_step: int | None = None) -> Path:
    contents = small_contents(step)
    state = {**contents.state, "progress": vars(Progress(step=step, best_step=best_step))}
    return save_checkpoint(store, step, Contents(contents.tensors, state))


def before_upload(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call ``act`` with the name of each object, before it is uploaded."""
    upload = RemoteFolder.upload

    def upload_after(self: RemoteFolder, source: Path, name: str, *rest: Any) -> None:
        act(name)
        upload(self, source, name, *rest)

    monkeypatch.setattr(RemoteFolder, "upload", upload_after)


def test_the_event_of_an_upload_follows_its_manifest(
    folder: RemoteFolder, log: CheckedLog, store: CheckpointStore, tmp_path: Path
) -> None:
    uploads = Mirror(tmp_path, folder)
    uploads.start(log, keep=3)
    for step in (10, 20):
        save(store, step)
        log.wait_for(step)
    uploads.finish_checkpoints()
    assert log.steps == [10, 20]
    for step, there in log.uploads:
        assert step in there


def test_a_slow_upload_is_followed_by_that_of_the_newest_checkpoint_alone(
    folder: RemoteFolder,
    log: CheckedLog,
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    has_begun = threading.Event()

    def wait(_: str) -> None:
        has_begun.set()
        assert may_go_on.wait(WAIT_S)

    before_upload(monkeypatch, wait)
    uploads = Mirror(tmp_path, folder)
    uploads.start(log, keep=3)
    save(store, 10)
    assert has_begun.wait(WAIT_S)
    for step in (20, 30, 40):  # the run goes on while the upload hangs
        save(store, step)
        store.retain(best_step=None)
    may_go_on.set()
    log.wait_for(40)
    uploads.finish_checkpoints()
    # The first one arrived whole, although the run had removed it from its own folder.
    assert log.steps == [10, 40]
    assert published(folder) == [40, 10]


def test_a_checkpoint_that_the_run_removes_during_its_upload_arrives_whole(
    folder: RemoteFolder,
    log: CheckedLog,
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save(store, 10)
    before_upload(monkeypatch, lambda _: shutil.rmtree(path, ignore_errors=True))
    uploads = Mirror(tmp_path, folder)
    uploads.start(log, keep=3)
    log.wait_for(10)
    uploads.finish_checkpoints()
    checkpoints = RemoteCheckpoints(folder / "checkpoints")
    checkpoints.download(checkpoints.newest_first()[0], tmp_path / "copy")


def test_the_best_checkpoint_is_uploaded_too_if_it_was_left_out(
    folder: RemoteFolder, log: CheckedLog, store: CheckpointStore, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save(store, step, best_step=10)
    uploads = Mirror(tmp_path, folder)
    uploads.start(log, keep=1)
    uploads.finish_checkpoints()
    assert log.steps == [30, 10]
    assert published(folder) == [30, 10]


def test_the_record_is_there_before_the_manifest(
    folder: RemoteFolder,
    log: CheckedLog,
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "events.jsonl").write_text("{}\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker_0.log").write_text("perhaps a secret\n")
    save(store, 10)
    write = RemoteFolder.write
    seen: list[bool] = []

    def write_after(self: RemoteFolder, name: str, content: bytes) -> None:
        seen.append("events.jsonl" in folder.files())
        write(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", write_after)
    uploads = Mirror(tmp_path, folder)
    uploads.start(log, keep=1)
    uploads.finish_checkpoints()
    assert seen == [True]
    # Logs follow when the run has ended and has masked them; hidden files never.
    assert "logs/worker_0.log" not in folder.files()
    uploads.finish()
    assert "logs/worker_0.log" in folder.files()
    assert not any("/." in f"/{name}" for name in folder.files())


def test_files_of_the_record_are_sent_again_only_if_they_have_changed(
    folder: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    before_upload(monkeypatch, sent.append)
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "events.jsonl").write_text("{}\n")
    uploads = Mirror(tmp_path, folder)
    uploads.finish()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("{}\n")
    uploads.finish()
    assert sent == ["config.yaml", "events.jsonl", "events.jsonl"]
    assert folder.read("events.jsonl", 100) == b"{}\n{}\n"


def test_an_unforeseen_error_is_told_and_ends_no_later_upload(
    store: CheckpointStore, tmp_path: Path, folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    log = CheckedLog(folder)

    def write(event: kinds.Event) -> None:
        told.append(f"{event.EVENT} {getattr(event, 'message', '')}")
        CheckedLog.write(log, event)
        if isinstance(event, kinds.Warned):
            raise OSError("no space left for the log")

    def fail_once(_name: str) -> None:
        if not told:
            raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(log, "write", write)
    before_upload(monkeypatch, fail_once)
    save(store, 4)
    uploads = Mirror(tmp_path, folder)
    uploads.start(log, keep=1)
    log.wait_for(4)
    uploads.stop()
    assert "nobody thought of this" in told[0]


def test_a_file_system_without_hard_links_gets_copies(
    store: CheckpointStore, tmp_path: Path, folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    save(store, 4)
    uploads = Mirror(tmp_path, folder)
    uploads.finish()
    assert published(folder) == [4]


def test_the_last_error_names_what_is_on_this_machine_alone(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)
    run_dir = tmp_path / "run 1"
    store = CheckpointStore(run_dir / "checkpoints")
    save(store, 4)
    (run_dir / "events.jsonl").write_text("{}\n")
    (run_dir / "config.yaml").write_text("task: digits\n")
    uploads = Mirror(run_dir, RemoteFolder(f"file://{tmp_path}/there"))
    uploads.finish()
    with (run_dir / "events.jsonl").open("a") as file:
        file.write("{}\n")

    def refuse(name: str) -> None:
        raise OSError(errno.EIO, f"cannot write {name}")

    before_upload(monkeypatch, refuse)
    with pytest.raises(TrainingFailed) as failed:
        uploads.finish()
    message = str(failed.value)
    assert f"not uploaded: events.jsonl. All of it is in {run_dir}; upload it with: " in message
    # The command does what it says.
    subprocess.run(message.partition("upload it with: ")[2], shell=True, check=True)
    assert (tmp_path / "there" / "events.jsonl").read_text() == "{}\n{}\n"
