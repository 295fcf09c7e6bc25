"""Saving, killed at every operation on the disk: no acknowledged checkpoint is lost, nothing half-written passes for one, and the next
save works. The same where the power goes and takes with it what was not synced, and where the disk is full."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orchestrator.train.checkpoint.files import load, verify
from orchestrator.train.checkpoint.store import CheckpointStore
from tests.support.crash_injection import Crash, Crashes, Mortals
from tests.support.save_scripts import KEEP, STORIES, Story, checkpoints, contents, number_of
from tests.support.strict_disk import StrictDisk
from tests.support.traced_disk import Disk, Fate, Operation

BY_NAME = {story.script: story for story in STORIES}
LUCK = (1.0, 0.0, 0.5, 0.5, 0.2, 0.8)


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    made = Mortals()
    yield made
    made.close()


def crashes_of(mortals: Mortals, folder: Path, name: str, syncs: bool = False) -> Crashes:
    return Crashes(mortals, BY_NAME[name].full_name, folder, BY_NAME[name].prepare, syncs)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks save too; what they save needs no syncing."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def window(story: Story, told: int) -> tuple[frozenset[int], frozenset[int]]:
    """What was promised last, and what will be next."""
    return story.promises[told], story.promises[min(told + 1, len(story.promises) - 1)]


def numbers(story: Story, told: int, step: int) -> set[int]:
    """The saves that a step may be of: the last that was told, or one that was not told yet. What lay there before has number 0."""
    known = [number for of, number in story.numbers[:told] if of == step]
    return {
        known[-1] if known else 0,
        *(number for of, number in story.numbers[told : told + 1] if of == step),
    }


def check(folder: Path, story: Story, told: int) -> None:
    """What a new start finds after a crash."""
    at, (before, after) = checkpoints(folder), window(story, told)
    seen, skipped = CheckpointStore(
        at, repair=False
    ).newest_good()  # others than the main worker look, and mend nothing
    store = CheckpointStore(at, keep=KEEP)
    found, skipped_too = store.newest_good()
    assert not skipped + skipped_too, "half a checkpoint under a good name"
    present = dict(store.newest_first())
    assert all(path.name == f"step_{step:08d}" for step, path in present.items())
    for step, path in present.items():
        assert number_of(load(path).state) in numbers(story, told, step), (
            f"step {step} is not as it was last told"
        )
    assert before <= set(present) or after <= set(present), (
        f"there: {sorted(present)}; promised: {sorted(before)} or {sorted(after)}"
    )
    if before:
        assert found is not None
        assert seen is not None
        newest = found[1].state["progress"]["step"]
        assert newest == seen[1].state["progress"]["step"] == max(present)
        assert min(max(before), max(after)) <= newest <= max(*before, *after)
    check_next_save(store, story)


def check_next_save(store: CheckpointStore, story: Story) -> None:
    """It works, and leaves nothing of the crash behind."""
    kept = {
        *sorted([90, *(step for step, _ in store.newest_first())])[-KEEP:],
        *([story.best] if story.best else []),
    }
    there = {step for step, _ in store.newest_first()} | {90}
    store.save(90, contents(90))
    store.retain(story.best)
    names = {path.name for path in store.folder.iterdir() if not path.name.startswith("abandoned_")}
    assert names == {f"step_{step:08d}" for step in kept & there}
    found, skipped = store.newest_good()
    assert found is not None
    assert (found[0].name, skipped) == ("step_00000090", [])


def check_killed(crash: Crash, story: Story) -> None:
    try:
        check(crash.folder, story, len(crash.told))
    except Exception as error:
        last = [operation for operation in crash.trace if operation.kind != "told"][-1:]
        raise AssertionError(
            f"{story.script}, killed {crash.fate.kind} operation {crash.fate.at} (done last: {last}): {error}"
        ) from error


# --- the parts of the test itself


def test_what_stands_in_for_safetensors_writes_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(7, 3), "n": torch.tensor(3)}
    save_file(tensors, tmp_path / "theirs")
    Disk(tmp_path / "disk", -1, Fate(), syncs=False).save_tensors(tensors, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_strict_disk_loses_what_was_not_synced(tmp_path: Path) -> None:
    (tmp_path / "was").mkdir()
    disk = StrictDisk(tmp_path / "was")
    for kind, path, to, at in (
        ("mkdir", "a", "", 0),
        ("open", "a/x", "", os.O_CREAT),
        ("open", "a/y", "", os.O_CREAT),
        ("sync", ".", "", 0),
        ("sync", "a", "", 0),
        ("rename", "a/x", "a/z", 0),
        ("truncate", "a/y", "", 3),
    ):
        disk.apply(Operation(kind, path, to, at=at))
    disk.lose_power(tmp_path / "none", 0.0, random.Random(0))
    disk.lose_power(tmp_path / "names", 1.0, random.Random(0))
    assert sorted(path.name for path in (tmp_path / "none" / "a").iterdir()) == ["x", "y"]
    assert (tmp_path / "none" / "a" / "y").read_bytes() == b""
    assert sorted(path.name for path in (tmp_path / "names" / "a").iterdir()) == ["y", "z"]


# --- killed


def test_killed_after_each_operation(mortals: Mortals, tmp_path: Path, quick: None) -> None:
    """Of a step that is saved again, and of one that pushes two others out; all are in the slow form."""
    crashes = crashes_of(mortals, tmp_path, "by_the_saver")
    points = crashes.points(after=3)
    assert len(points) > 40
    for crash in crashes.of(Fate("after", at) for at in points):
        check_killed(crash, BY_NAME["by_the_saver"])


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("name", BY_NAME)
def test_killed_on_either_side_of_each_operation(
    mortals: Mortals, tmp_path: Path, name: str, side: str
) -> None:
    story = BY_NAME[name]
    crashes = crashes_of(mortals, tmp_path, name, syncs=True)
    for crash in crashes.of(Fate(side, at) for at in crashes.points()):
        check_killed(crash, story)


# --- the power lost


def check_power_losses(crashes: Crashes, story: Story, chances: tuple[float, ...]) -> int:
    whole = crashes.undisturbed()
    now = crashes.folder.with_name("now")
    disk, told = StrictDisk(crashes.before), 0
    for number, operation in enumerate((None, *whole.trace)):
        if operation is not None:
            disk.apply(operation)
            told += operation.kind == "told"
        for chance, luck in enumerate(chances):
            disk.lose_power(now, luck, random.Random(number * 100 + chance))
            try:
                check(now, story, told)
            except Exception as error:
                raise AssertionError(
                    f"{story.script}, power lost after {number} ({operation}), luck {luck}: {error}"
                ) from error
            shutil.rmtree(now)
    return len(whole.trace)


@pytest.mark.parametrize("name", ["by_the_store", "resumed"])
def test_the_power_is_lost_after_each_operation(
    mortals: Mortals, tmp_path: Path, quick: None, name: str
) -> None:
    assert (
        check_power_losses(
            crashes_of(mortals, tmp_path, name),
            BY_NAME[name],
            LUCK[1:3] if name == "by_the_store" else LUCK[:3],
        )
        > 50
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_the_power_is_lost_with_any_luck(mortals: Mortals, tmp_path: Path, quick: None, name: str) -> None:
    check_power_losses(crashes_of(mortals, tmp_path, name), BY_NAME[name], LUCK * 4)


# --- a full disk


def check_full(crash: Crash, story: Story) -> None:
    """The script went on to its end. The newest of what was told or is there are there, the best too, and all are good."""
    at = checkpoints(crash.folder)
    _, skipped = CheckpointStore(at, repair=False).newest_good()
    assert not skipped
    present = {step for step, _ in CheckpointStore(at, repair=False).newest_first()}
    promised = {*story.lasting, *crash.told}
    wanted = set(sorted(promised | present)[-KEEP:]) | {step for step in promised if step == story.best}
    assert wanted <= present, f"there: {sorted(present)}; wanted: {sorted(wanted)}"
    store = CheckpointStore(at, keep=KEEP)
    for _, path in store.newest_first():
        verify(path)
    check_next_save(store, story)


def test_a_disk_full_at_each_operation(mortals: Mortals, tmp_path: Path, quick: None) -> None:
    check_all_full(crashes_of(mortals, tmp_path, "resumed"), BY_NAME["resumed"], ["full"])


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_a_disk_full_at_each_operation_of_every_kind(
    mortals: Mortals, tmp_path: Path, quick: None, name: str
) -> None:
    check_all_full(crashes_of(mortals, tmp_path, name), BY_NAME[name], ["full", "full once"])


def check_all_full(crashes: Crashes, story: Story, kinds: list[str]) -> None:
    told = set()
    for crash in crashes.of(Fate(kind, at) for at in crashes.points() for kind in kinds):
        told.add(len(crash.told))
        try:
            check_full(crash, story)
        except Exception as error:
            raise AssertionError(f"{story.script}, {crash.fate.kind} at {crash.fate.at}: {error}") from error
    assert len(told) > 1, "a full disk was never felt"
