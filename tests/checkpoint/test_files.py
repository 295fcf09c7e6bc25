"""The files of a checkpoint: every damage is detected, and a file that no run wrote is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.storage.checkpoints import save_checkpoint, small_contents
from orchestrator.checkpoint import files
from orchestrator.checkpoint.files import MAX_MANIFEST_BYTES, load, manifest_bytes, read_manifest
from orchestrator.checkpoint.hashed_file import PIECE_BYTES, Hashes
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import CheckpointDamaged, UserError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(CheckpointStore(tmp_path), 30, small_contents(30))


def test_every_byte_of_the_manifest_counts(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    intact = manifest.read_bytes()
    for position in range(len(intact)):
        for bit in (0, 4, 6):
            data = bytearray(intact)
            data[position] ^= 1 << bit
            manifest.write_bytes(bytes(data))
            with pytest.raises(CheckpointDamaged):
                load(checkpoint)
    manifest.write_bytes(intact)
    load(checkpoint)


def test_a_file_that_the_manifest_does_not_name_is_refused(checkpoint: Path) -> None:
    (checkpoint / "extra.bin").write_bytes(b"?")
    with pytest.raises(CheckpointDamaged, match=r"extra\.bin"):
        load(checkpoint)


def test_a_manifest_with_a_path_outside_the_folder_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"]["../../secret"] = manifest["files"].pop("state.json")
    path.write_text(json.dumps(manifest, sort_keys=True, indent=1))
    with pytest.raises(CheckpointDamaged, match="not as it was written"):
        load(checkpoint)


def test_a_missing_checkpoint_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        load(tmp_path / "nothing")


def test_a_manifest_holds_the_hashes_of_a_large_state() -> None:
    """Fifty terabytes in pieces of the usual size."""
    pieces = Hashes(((PIECE_BYTES, "a" * 64),) * 1000)
    bytes_per_piece = len(manifest_bytes(1, {"state.json": pieces})) / 1000
    assert 50e12 / PIECE_BYTES * bytes_per_piece < MAX_MANIFEST_BYTES


@pytest.mark.parametrize(
    ("bound", "name"), [("MAX_MANIFEST_BYTES", "manifest.json"), ("MAX_STATE_BYTES", "state.json")]
)
def test_a_checkpoint_that_could_not_be_read_again_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, name: str
) -> None:
    monkeypatch.setattr(files, bound, 100)
    with pytest.raises(UserError, match=rf"would have a {name} of [\d,]+ bytes, and at most 100 are read"):
        save_checkpoint(CheckpointStore(tmp_path), 30, small_contents(30))
    assert not list(tmp_path.glob("step_*"))


def test_a_manifest_up_to_the_bound_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_MANIFEST_BYTES", (checkpoint / "manifest.json").stat().st_size)
    assert read_manifest(checkpoint)
