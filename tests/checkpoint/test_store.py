"""The checkpoints of a run: complete or absent, retained by age and result, found when good."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.storage.checkpoints import DAMAGE_KINDS, damage, save_checkpoint, small_contents
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.store import CheckpointStore

OPERATIONS = ("mkdir", "rename", "fsync", "rmdir", "unlink", "open")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store with checkpoints of steps 10, 20 and 30."""
    new_store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        save_checkpoint(new_store, step, small_contents(step))
    return new_store


def test_a_saved_checkpoint_is_loaded_again(store: CheckpointStore) -> None:
    newest, skipped = store.newest_good()
    assert newest is not None
    path, loaded = newest
    assert path.name == "step_00000030"
    assert not skipped
    assert torch.equal(loaded.tensors["model"]["w"], small_contents(30).tensors["model"]["w"])
    assert loaded.state == small_contents(30).state


def test_a_step_that_is_saved_again_takes_the_place_of_the_older(store: CheckpointStore) -> None:
    save_checkpoint(store, 30, small_contents(31))
    assert {path.name for path in store.folder.iterdir()} == {f"step_{step:08d}" for step in (10, 20, 30)}
    newest, _ = store.newest_good()
    assert newest is not None
    assert newest[1].state == small_contents(31).state


def test_retention_keeps_the_newest_and_the_best(store: CheckpointStore) -> None:
    save_checkpoint(store, 40, small_contents(40))
    save_checkpoint(store, 50, small_contents(50))
    store.retain(best_step=10)
    assert [step for step, _ in store.newest_first()] == [50, 40, 30, 10]
    assert not list(store.folder.glob(".*"))


def test_a_hundred_random_corruptions_are_all_detected(store: CheckpointStore, tmp_path: Path) -> None:
    generator = random.Random(7)
    intact = tmp_path / "intact"
    shutil.copytree(store.folder, intact)
    kinds = set()
    for number in range(100):
        shutil.rmtree(store.folder)
        shutil.copytree(intact, store.folder)
        kind, file = damage(store.folder / "step_00000030", store.folder / "step_00000020", generator)
        kinds.add(kind)
        newest, skipped = store.newest_good()
        skipped_names = [entry.path.name for entry in skipped]
        assert skipped_names == ["step_00000030"], f"case {number}: {kind} of {file} not detected"
        assert newest is not None
        assert newest.path.name == "step_00000020"
    assert kinds == set(DAMAGE_KINDS)


def test_no_good_checkpoint_gives_none_and_the_reasons(store: CheckpointStore) -> None:
    for _, path in store.newest_first():
        (path / "state.json").unlink()
    newest, skipped = store.newest_good()
    assert newest is None
    assert len(skipped) == 3
    assert "state.json" in skipped[0].reason


def test_an_unreadable_file_is_damage_not_an_error(store: CheckpointStore) -> None:
    file = store.folder / "step_00000030" / "state.json"
    file.unlink()
    file.symlink_to("nowhere")
    newest, skipped = store.newest_good()
    assert newest is not None
    assert newest.path.name == "step_00000020"
    assert "cannot be read" in skipped[0].reason


def test_later_checkpoints_do_not_outrank_those_of_a_resumed_run(
    store: CheckpointStore,
) -> None:
    for _, path in store.newest_first():
        (path / "state.json").unlink()
    store.set_aside_after(0)
    save_checkpoint(store, 5, small_contents(5))
    store.retain(None)
    newest, skipped = store.newest_good()
    assert newest is not None
    assert newest.path.name == "step_00000005"
    assert not skipped
    assert len(list(store.folder.glob("abandoned_step_*"))) == 3


def test_a_full_disk_leaves_no_half_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchestrator.checkpoint.files.sync", fail)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(store, 40, small_contents(40))
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["step_00000010", "step_00000020", "step_00000030"]


class Killed(BaseException):
    """Takes the place of SIGKILL: our code must not catch it."""


def test_killed_after_each_file_system_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save step 30 again, with retention, and be killed after the n-th operation, for every n.

    The acknowledged checkpoints 20 and 30 are there and good, and the next save works."""
    num_kills = 0
    for limit in range(200):
        folder = tmp_path / f"run{limit}"
        store = CheckpointStore(folder, keep=2)
        for step in (10, 20, 30):
            save_checkpoint(store, step, small_contents(step))
        finished = _save_until_killed(store, limit, monkeypatch)
        restarted = CheckpointStore(folder, keep=2)
        newest, skipped = restarted.newest_good()
        assert newest is not None
        assert newest.path.name == "step_00000030", f"lost after {limit} operations"
        assert not skipped, skipped
        load(folder / "step_00000020")
        save_checkpoint(restarted, 40, small_contents(40))
        restarted.retain(None)
        assert [step for step, _ in restarted.newest_first()] == [40, 30]
        num_kills += 1
        if finished:
            break
    else:
        pytest.fail("the save never finished")
    assert num_kills > 20


def _save_until_killed(store: CheckpointStore, limit: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Save step 30, killed after ``limit`` operations. Return whether the save finished before."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
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
            save_checkpoint(store, 30, small_contents(30))
            store.retain(None)
        except Killed:
            return False
    return True
