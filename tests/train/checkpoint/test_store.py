"""Checkpoints: whole or not at all, every damage seen, the newest good one used."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.train.checkpoint.files import Contents, load, verify
from orchestrator.train.checkpoint.store import CheckpointStore


def contents(step: int) -> Contents:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model": {"w": torch.randn(40, 7, generator=generator), "n": torch.tensor(step)},
        "optimizer": {"exp_avg/w": torch.full((3,), step)},
    }
    return Contents(tensors, {"progress": {"step": step}, "text": "x" * 300})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        made.save(step, contents(step))
    return made


def test_round_trip(store: CheckpointStore) -> None:
    found, skipped = store.newest_good()
    assert found is not None
    path, loaded = found
    assert path.name == "step_00000030"
    assert not skipped
    assert torch.equal(loaded.tensors["model"]["w"], contents(30).tensors["model"]["w"])
    assert loaded.state == contents(30).state


def test_retention_keeps_the_newest_and_the_best(store: CheckpointStore) -> None:
    store.save(40, contents(40))
    store.save(50, contents(50))
    store.retain(best_step=10)
    assert [step for step, _ in store.newest_first()] == [50, 40, 30, 10]
    assert not list(store.folder.glob(".*"))


def damage(folder: Path, other: Path, generator: random.Random) -> str:
    """One random wound of a checkpoint: flipped bit, truncation, missing file, swapped file."""
    kind = generator.choice(["flip", "truncate", "missing", "swap"])
    victim = folder / generator.choice(sorted(p.name for p in folder.iterdir()))
    data = bytearray(victim.read_bytes())
    if kind == "flip":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        victim.write_bytes(bytes(data))
    elif kind == "truncate":
        victim.write_bytes(bytes(data[: generator.randrange(len(data))]))
    elif kind == "missing":
        victim.unlink()
    else:
        victim.write_bytes((other / victim.name).read_bytes())
    return f"{kind} of {victim.name}"


def test_a_hundred_random_corruptions_are_all_detected(store: CheckpointStore, tmp_path: Path) -> None:
    generator = random.Random(7)
    clean = tmp_path / "clean"
    shutil.copytree(store.folder, clean)
    seen = set()
    for number in range(100):
        shutil.rmtree(store.folder)
        shutil.copytree(clean, store.folder)
        what = damage(store.folder / "step_00000030", store.folder / "step_00000020", generator)
        seen.add(what.split()[0])
        found, skipped = store.newest_good()
        assert [s.path.name for s in skipped] == ["step_00000030"], f"case {number}: {what} not seen"
        assert found is not None
        assert found[0].name == "step_00000020"
    assert seen == {"flip", "truncate", "missing", "swap"}


def test_every_byte_of_the_manifest_counts(store: CheckpointStore) -> None:
    path = store.folder / "step_00000030" / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (0, 4, 6):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            path.write_bytes(bytes(data))
            with pytest.raises(CheckpointDamaged):
                verify(path.parent)
    path.write_bytes(whole)
    verify(path.parent)


def test_all_damaged_gives_none_and_says_why(store: CheckpointStore) -> None:
    for _, path in store.newest_first():
        (path / "state.json").unlink()
    found, skipped = store.newest_good()
    assert found is None
    assert len(skipped) == 3
    assert "state.json" in skipped[0].reason


def test_a_stranger_in_the_folder_is_refused(store: CheckpointStore) -> None:
    (store.folder / "step_00000030" / "extra.bin").write_bytes(b"?")
    with pytest.raises(CheckpointDamaged, match=r"extra\.bin"):
        verify(store.folder / "step_00000030")


def test_a_manifest_that_names_paths_outside_is_refused(store: CheckpointStore) -> None:
    path = store.folder / "step_00000030" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"]["../../secret"] = manifest["files"].pop("state.json")
    path.write_text(json.dumps(manifest, sort_keys=True, indent=1))
    with pytest.raises(CheckpointDamaged, match="not as it was written"):
        verify(path.parent)


def test_an_unreadable_file_is_damage_not_a_crash(store: CheckpointStore) -> None:
    victim = store.folder / "step_00000030" / "state.json"
    victim.unlink()
    victim.symlink_to("nowhere")
    found, skipped = store.newest_good()
    assert found is not None
    assert found[0].name == "step_00000020"
    assert "cannot be read" in skipped[0].reason


def test_what_a_run_left_behind_does_not_outrank_what_it_saves_anew(store: CheckpointStore) -> None:
    for _, path in store.newest_first():
        (path / "state.json").unlink()
    store.set_aside_after(0)
    store.save(5, contents(5))
    store.retain(None)
    found, skipped = store.newest_good()
    assert found is not None
    assert found[0].name == "step_00000005"
    assert not skipped
    assert len(list(store.folder.glob("abandoned_step_*"))) == 3


def test_a_full_disk_leaves_no_half_a_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchestrator.train.checkpoint.files.sync", full)
    with pytest.raises(OSError, match="No space"):
        store.save(40, contents(40))
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "step_00000010",
        "step_00000020",
        "step_00000030",
    ]


def test_no_checkpoint_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        load(tmp_path / "nothing")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


OPERATIONS = ("mkdir", "rename", "fsync", "rmdir", "unlink", "open")


def test_killed_after_each_file_system_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save step 30 over an existing one with retention, killed after the n-th operation, for every n: the acknowledged
    checkpoints 20 and 30 are there and good, whatever else lies around, and the next save works."""
    survived = 0
    for limit in range(200):
        folder = tmp_path / f"run{limit}"
        store = CheckpointStore(folder, keep=2)
        for step in (10, 20, 30):
            store.save(step, contents(step))
        done = _save_until_killed(store, limit, monkeypatch)
        again = CheckpointStore(folder, keep=2)
        found, skipped = again.newest_good()
        assert found is not None
        assert found[0].name == "step_00000030", f"lost after {limit} operations"
        assert not skipped, skipped
        verify(folder / "step_00000020")
        again.save(40, contents(40))
        again.retain(None)
        assert [s for s, _ in again.newest_first()] == [40, 30]
        survived += 1
        if done:
            break
    else:
        pytest.fail("the save never finished")
    assert survived > 20


def _save_until_killed(store: CheckpointStore, limit: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    count = 0

    def counted(real):  # type: ignore[no-untyped-def]
        def call(*arguments, **named):  # type: ignore[no-untyped-def]
            nonlocal count
            if count >= limit:
                raise Killed
            count += 1
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            store.save(30, contents(30))
            store.retain(None)
        except Killed:
            return False
    return True
