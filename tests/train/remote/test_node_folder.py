"""Tests of the checkpoints that a node downloads once: no process loses what another one reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.storage.checkpoints import remote_run_with_checkpoints
from harness.storage.folder_links import no_requests
from orchestrator.checkpoint.files import load
from orchestrator.errors import CheckpointDamaged
from orchestrator.storage import folder as storage_folder
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote.node_store import NodeStore

_WAIT_S = 60.0
NAMES = ("step_00000020", "step_00000040")
SAVE = ".writing_step_00000060_00000001"


@pytest.fixture
def folder(tmp_path: Path) -> RemoteFolder:
    """A remote run with the checkpoints of steps 20 and 40."""
    return remote_run_with_checkpoints(tmp_path / "written")


@pytest.fixture
def processes(folder: RemoteFolder, tmp_path: Path) -> list[NodeStore]:
    """The stores of two processes of one node."""
    node = tmp_path / "node" / "run"
    return [NodeStore(tmp_path / f"process{n}" / "checkpoints", folder, node, no_requests) for n in range(2)]


@contextmanager
def paused_download(monkeypatch: pytest.MonkeyPatch, store: NodeStore, name: str) -> Iterator[list[Path]]:
    """Let a process download a checkpoint, and pause before its last file while the block runs.

    Yields the list that then gets the path of the checkpoint."""
    begun = threading.Event()
    may_end = threading.Event()
    download = RemoteFolder.download

    def pause(self: RemoteFolder, file: str, target: Path) -> None:
        if file.startswith(name) and target.name == "state.json":
            begun.set()
            assert may_end.wait(_WAIT_S)
        download(self, file, target)

    monkeypatch.setattr(RemoteFolder, "download", pause)
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)
    paths: list[Path] = []
    thread = threading.Thread(target=lambda: paths.append(store.fetch_named(name)))
    thread.start()
    assert begun.wait(_WAIT_S)
    try:
        yield paths
    finally:
        may_end.set()
        thread.join(_WAIT_S)
        assert not thread.is_alive()


def test_a_save_does_not_remove_what_another_process_downloads(
    processes: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    with paused_download(monkeypatch, processes[0], NAMES[1]) as paths:
        processes[1].part_folder(SAVE)
    (path,) = paths
    load(path)


def test_two_checkpoints_are_downloaded_at_once(
    processes: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    with paused_download(monkeypatch, processes[0], NAMES[0]) as paths:
        load(processes[1].fetch_named(NAMES[1]))
    (path,) = paths
    load(path)


def test_a_checkpoint_stays_while_a_process_reads_it(processes: list[NodeStore]) -> None:
    reader, other = processes
    (_, newest), (_, older) = reader.newest_first()
    with reader.reading(newest) as path:
        other.part_folder(SAVE)
        with other.reading(older) as second:
            load(second)
            load(path)
    other.part_folder(SAVE)
    assert not path.exists()
    assert not second.exists()


def test_both_processes_read_one_checkpoint_at_once(processes: list[NodeStore]) -> None:
    (_, newest), _ = processes[0].newest_first()
    with processes[0].reading(newest) as first, processes[1].reading(newest) as second:
        assert first == second


def test_a_checkpoint_that_was_removed_is_downloaded_again(processes: list[NodeStore]) -> None:
    (_, newest), _ = processes[0].newest_first()
    for _ in range(2):
        with processes[0].reading(newest) as path:
            load(path)
        processes[1].part_folder(SAVE)
        assert not path.exists()


def test_a_failed_download_lets_go_of_its_lock(
    processes: list[NodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RemoteError("the storage is down")

    (_, newest), _ = processes[0].newest_first()
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "download", refuse)
        with pytest.raises(RemoteError, match="the storage is down"), processes[0].reading(newest):
            pass
    with processes[1].reading(newest) as path:
        load(path)


def test_a_damaged_checkpoint_is_told_to_each_process(
    processes: list[NodeStore], folder: RemoteFolder
) -> None:
    folder.write(f"checkpoints/{NAMES[1]}/state.json", b"damaged")
    (_, newest), _ = processes[0].newest_first()
    for store in processes:
        with pytest.raises(CheckpointDamaged), store.reading(newest):
            pass
