"""The files of a checkpoint: every damage is detected, and a file that no run wrote is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.train.checkpoint.files import load
from orchestrator.train.checkpoint.store import CheckpointStore
from tests.support.storage.checkpoints import save_checkpoint, small_contents


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
