"""Tests of checkpoints in a remote folder: at any moment the published ones are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.storage.checkpoints import save_checkpoint, small_contents
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import CheckpointDamaged
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote.checkpoints import RemoteCheckpoints


class KilledAt:
    """Ends a remote folder's operations as a kill would: from the given one on, none is carried out."""

    def __init__(self, folder: RemoteFolder, operation: int) -> None:
        self._folder = folder
        self._operations_left = operation

    def __getattr__(self, name: str) -> object:
        action = getattr(self._folder, name)
        if name not in ("write", "upload", "remove"):
            return action
        return lambda *arguments: self._each(name, *arguments)

    def _each(self, name: str, *arguments: Any) -> None:
        # Objects are removed one after the other.
        parts = [([file],) for file in arguments[0]] if name == "remove" else [arguments]
        for part in parts:
            if self._operations_left == 0:
                raise RemoteError("killed")
            self._operations_left -= 1
            getattr(self._folder, name)(*part)


@pytest.fixture
def folder() -> RemoteFolder:
    return RemoteFolder(f"memory://{uuid4().hex}/checkpoints")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=10)


def save(store: CheckpointStore, step: int) -> Path:
    return save_checkpoint(store, step, small_contents(step))


def nothing() -> None:
    pass


def good_steps(folder: RemoteFolder, target: Path) -> list[int]:
    """Download every published checkpoint, which verifies it. Return their steps."""
    checkpoints = RemoteCheckpoints(folder)
    published = checkpoints.newest_first()
    for number, checkpoint in enumerate(published):
        checkpoints.download(checkpoint, target / str(number))
    return [checkpoint.step for checkpoint in published]


def test_a_checkpoint_is_downloaded_as_it_was(
    folder: RemoteFolder, store: CheckpointStore, tmp_path: Path
) -> None:
    path = save(store, 40)
    checkpoints = RemoteCheckpoints(folder)
    assert checkpoints.upload(path, nothing) == sum(file.stat().st_size for file in path.iterdir())
    copy = checkpoints.download(checkpoints.newest_first()[0], tmp_path / "copy")
    assert copy.name == path.name
    for file in path.iterdir():
        assert (copy / file.name).read_bytes() == file.read_bytes()
    load(copy)


def test_the_manifest_is_the_last_file_and_follows_the_record(
    folder: RemoteFolder, store: CheckpointStore
) -> None:
    path = save(store, 40)
    seen: list[set[str]] = []
    RemoteCheckpoints(folder).upload(path, lambda: seen.append(set(folder.files())))
    assert seen == [{f"step_00000040/{file.name}" for file in path.iterdir() if file.name != "manifest.json"}]


def test_the_same_checkpoint_is_not_sent_again(folder: RemoteFolder, store: CheckpointStore) -> None:
    path = save(store, 40)
    checkpoints = RemoteCheckpoints(folder)
    assert checkpoints.upload(path, nothing)
    assert checkpoints.upload(path, nothing) is None


@pytest.mark.parametrize("operation", range(12))
def test_a_kill_at_any_operation_of_an_upload_loses_no_published_checkpoint(
    folder: RemoteFolder, store: CheckpointStore, tmp_path: Path, operation: int
) -> None:
    RemoteCheckpoints(folder).upload(save(store, 20), nothing)
    RemoteCheckpoints(folder).upload(save(store, 40), nothing)
    again = save_checkpoint(store, 40, small_contents(41))  # step 40 once more, with other weights
    killed = RemoteCheckpoints(KilledAt(folder, operation))  # pyrefly: ignore[bad-argument-type]
    try:
        killed.upload(again, nothing)
        killed.retain(1, best_step=None)
        is_acknowledged = True
    except RemoteError:
        is_acknowledged = False
    steps = good_steps(folder, tmp_path / "copies")
    assert steps[0] == 40
    assert steps == [40] if is_acknowledged else set(steps) <= {20, 40}
    # The next process uploads, and leaves no remains.
    survivor = RemoteCheckpoints(folder)
    survivor.upload(save(store, 60), nothing)
    survivor.retain(1, best_step=None)
    assert good_steps(folder, tmp_path / "later") == [60]
    assert {file.partition("/")[0] for file in folder.files()} == {"step_00000060"}


def test_the_newest_and_the_best_are_retained(folder: RemoteFolder, store: CheckpointStore) -> None:
    checkpoints = RemoteCheckpoints(folder)
    for step in (10, 20, 30, 40, 50):
        checkpoints.upload(save(store, step), nothing)
        checkpoints.retain(2, best_step=20)
    assert [checkpoint.step for checkpoint in checkpoints.newest_first()] == [50, 40, 20]


def test_abandoned_checkpoints_are_not_published_and_their_files_stay(
    folder: RemoteFolder, store: CheckpointStore
) -> None:
    checkpoints = RemoteCheckpoints(folder)
    for step in (10, 20, 30):
        checkpoints.upload(save(store, step), nothing)
    checkpoints.abandon_after(10)
    checkpoints.retain(1, best_step=None)
    assert [checkpoint.step for checkpoint in checkpoints.newest_first()] == [10]
    assert "step_00000030/state.json" in folder.files()


def test_a_new_upload_of_an_abandoned_step_overwrites_nothing_and_is_removed_in_its_turn(
    folder: RemoteFolder, store: CheckpointStore
) -> None:
    checkpoints = RemoteCheckpoints(folder)
    checkpoints.upload(save(store, 20), nothing)
    before = folder.read("step_00000020/model_00000.safetensors", 2**20)
    checkpoints.abandon_after(10)
    checkpoints.upload(save_checkpoint(store, 20, small_contents(21)), nothing)
    assert [checkpoint.name for checkpoint in checkpoints.newest_first()] == ["step_00000020.1"]
    assert folder.read("step_00000020/model_00000.safetensors", 2**20) == before
    checkpoints.upload(save(store, 30), nothing)
    checkpoints.retain(1, best_step=None)
    assert {file.partition("/")[0] for file in folder.files()} == {"step_00000020", "step_00000030"}


def test_a_checkpoint_that_a_killed_start_has_half_abandoned_is_removed_in_its_turn(
    folder: RemoteFolder, store: CheckpointStore
) -> None:
    checkpoints = RemoteCheckpoints(folder)
    checkpoints.upload(save(store, 20), nothing)
    with pytest.raises(RemoteError, match="killed"):
        RemoteCheckpoints(KilledAt(folder, 1)).abandon_after(10)  # pyrefly: ignore[bad-argument-type]
    checkpoints.upload(save(store, 30), nothing)
    checkpoints.retain(1, best_step=None)
    assert {file.partition("/")[0] for file in folder.files()} == {"step_00000030"}


def test_a_flipped_bit_and_a_missing_file_are_found_before_the_checkpoint_is_used(
    folder: RemoteFolder, store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoints = RemoteCheckpoints(folder)
    checkpoints.upload(save(store, 40), nothing)
    checkpoint = checkpoints.newest_first()[0]
    content = bytearray(folder.read("step_00000040/model_00000.safetensors", 2**20) or b"")
    content[-1] ^= 1
    folder.write("step_00000040/model_00000.safetensors", bytes(content))
    with pytest.raises(CheckpointDamaged, match=r"model_00000\.safetensors has sha256"):
        checkpoints.download(checkpoint, tmp_path / "copy")
    folder.remove(["step_00000040/model_00000.safetensors"])
    with pytest.raises(CheckpointDamaged, match=r"model_00000\.safetensors is missing"):
        checkpoints.download(checkpoint, tmp_path / "copy")
    assert not list((tmp_path / "copy").iterdir())


def test_names_of_a_hostile_manifest_become_no_paths(folder: RemoteFolder, tmp_path: Path) -> None:
    folder.write("step_00000040/manifest.json", b'{"files": {"../../evil": []}, "format": 2, "step": 40}')
    checkpoints = RemoteCheckpoints(folder)
    with pytest.raises(CheckpointDamaged):
        checkpoints.download(checkpoints.newest_first()[0], tmp_path / "copy")
