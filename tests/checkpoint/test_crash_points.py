"""Saves that are killed at every operation on the disk, that lose power, or that fill the disk.

No acknowledged checkpoint is lost, nothing half-written passes for a checkpoint, and the next
save works."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.faults.crash_injection import Crash, CrashRunner, CrashSeries
from harness.storage.checkpoints import save_checkpoint
from harness.storage.save_scripts import (
    KEEP,
    SCRIPTS,
    SaveScript,
    checkpoints,
    contents,
    save_number,
)
from harness.storage.strict_disk import StrictDisk
from harness.storage.traced_disk import DiskFault, Operation
from orchestrator.checkpoint.files import load, step_name
from orchestrator.checkpoint.store import CheckpointStore

BY_NAME = {script.name: script for script in SCRIPTS}
NEXT_STEP = 90
LUCK = (1.0, 0.0, 0.5, 0.5, 0.2, 0.8)


@pytest.fixture(scope="module")
def runner() -> Iterator[CrashRunner]:
    crash_runner = CrashRunner()
    yield crash_runner
    crash_runner.close()


def series_of(runner: CrashRunner, folder: Path, name: str, syncs: bool = False) -> CrashSeries:
    return CrashSeries(runner, BY_NAME[name].full_name, folder, BY_NAME[name].prepare, syncs)


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks save too, and need not sync."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def promised_steps(script: SaveScript, num_acknowledged: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the steps promised by the last acknowledgement, and by the next one."""
    next_index = min(num_acknowledged + 1, len(script.promises) - 1)
    return script.promises[num_acknowledged], script.promises[next_index]


def possible_numbers(script: SaveScript, num_acknowledged: int, step: int) -> set[int]:
    """Return the saves that a step may be of: the last acknowledged, or the one in progress.

    A checkpoint from before the script has number 0."""
    acknowledged = [number for saved, number in script.saves[:num_acknowledged] if saved == step]
    in_progress = script.saves[num_acknowledged : num_acknowledged + 1]
    return {
        acknowledged[-1] if acknowledged else 0,
        *(number for saved, number in in_progress if saved == step),
    }


def check(folder: Path, script: SaveScript, num_acknowledged: int) -> None:
    """Check what a new start of the run finds after a crash."""
    path = checkpoints(folder)
    before, after = promised_steps(script, num_acknowledged)
    # Workers other than the main one look without repairing.
    unrepaired, skipped_unrepaired = CheckpointStore(path, repair=False).newest_good()
    store = CheckpointStore(path, keep=KEEP)
    newest, skipped = store.newest_good()
    assert not skipped_unrepaired + skipped, "half a checkpoint under a good name"
    present = dict(store.newest_first())
    for step, checkpoint in present.items():
        assert checkpoint.name == step_name(step)
        number = save_number(load(checkpoint).state)
        possible = possible_numbers(script, num_acknowledged, step)
        assert number in possible, f"step {step} is of save {number}, not of {possible}"
    has_all = before <= set(present) or after <= set(present)
    assert has_all, f"present: {sorted(present)}; promised: {sorted(before)} or {sorted(after)}"
    if before:
        assert newest is not None
        assert unrepaired is not None
        newest_step = newest.contents.state["progress"]["step"]
        assert newest_step == unrepaired.contents.state["progress"]["step"] == max(present)
        assert min(max(before), max(after)) <= newest_step <= max(*before, *after)
    check_next_save(store, script)


def check_next_save(store: CheckpointStore, script: SaveScript) -> None:
    """Check that the next save works, and removes all remains of the crash."""
    present = {NEXT_STEP, *(step for step, _ in store.newest_first())}
    retained = {*sorted(present)[-KEEP:], *(present & {script.best})}
    save_checkpoint(store, NEXT_STEP, contents(NEXT_STEP))
    store.retain(script.best)
    names = {path.name for path in store.folder.iterdir() if not path.name.startswith("abandoned_")}
    assert names == {step_name(step) for step in retained}
    newest, skipped = store.newest_good()
    assert newest is not None
    assert (newest.path.name, skipped) == (step_name(NEXT_STEP), [])


def check_killed(crash: Crash, script: SaveScript) -> None:
    try:
        check(crash.folder, script, len(crash.acknowledged))
    except Exception as error:
        operations = [operation for operation in crash.trace if operation.kind != "acknowledged"]
        raise AssertionError(
            f"{script.name}, killed {crash.fault.kind} operation {crash.fault.at} "
            f"(last operation: {operations[-1:]}): {error}"
        ) from error


# The instruments of these tests


def test_a_strict_disk_loses_what_was_not_synced(tmp_path: Path) -> None:
    (tmp_path / "initial").mkdir()
    disk = StrictDisk(tmp_path / "initial")
    for operation in (
        Operation("mkdir", "a"),
        Operation("open", "a/x", number=os.O_CREAT),
        Operation("open", "a/y", number=os.O_CREAT),
        Operation("sync", "."),
        Operation("sync", "a"),
        Operation("rename", "a/x", "a/z"),
        Operation("truncate", "a/y", number=3),
    ):
        disk.apply(operation)
    disk.lose_power(tmp_path / "none", 0.0, random.Random(0))
    disk.lose_power(tmp_path / "names", 1.0, random.Random(0))
    assert sorted(path.name for path in (tmp_path / "none" / "a").iterdir()) == ["x", "y"]
    assert (tmp_path / "none" / "a" / "y").read_bytes() == b""
    assert sorted(path.name for path in (tmp_path / "names" / "a").iterdir()) == [
        "y",
        "z",
    ]


# Killed


def test_killed_after_each_operation(runner: CrashRunner, tmp_path: Path, no_syncs: None) -> None:
    """A step that is saved again, and one whose retention removes two others.

    The slow test has all of them."""
    series = series_of(runner, tmp_path, "save_with_writer")
    operations = series.operations(after=3)
    assert len(operations) > 40
    for crash in series.run(DiskFault("after", number) for number in operations):
        check_killed(crash, BY_NAME["save_with_writer"])


def test_three_hosts_killed_at_an_operation(runner: CrashRunner, tmp_path: Path, no_syncs: None) -> None:
    """Every fifth operation; the slow test has all of them."""
    series = series_of(runner, tmp_path, "save_with_hosts")
    operations = series.operations()[::5]
    assert len(operations) > 20
    for crash in series.run(DiskFault("after", number) for number in operations):
        check_killed(crash, BY_NAME["save_with_hosts"])


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("name", BY_NAME)
def test_killed_on_either_side_of_each_operation(
    runner: CrashRunner, tmp_path: Path, name: str, side: str
) -> None:
    series = series_of(runner, tmp_path, name, syncs=True)
    for crash in series.run(DiskFault(side, number) for number in series.operations()):
        check_killed(crash, BY_NAME[name])


# Power lost


def check_power_losses(series: CrashSeries, script: SaveScript, luck: tuple[float, ...]) -> int:
    """Lose power after each operation, with each luck. Return the number of operations."""
    trace = series.run_undisturbed().trace
    folder = series.folder.with_name("after_power_loss")
    disk = StrictDisk(series.initial_folder)
    num_acknowledged = 0
    for number, operation in enumerate((None, *trace)):
        if operation is not None:
            disk.apply(operation)
            num_acknowledged += operation.kind == "acknowledged"
        for index, chance in enumerate(luck):
            disk.lose_power(folder, chance, random.Random(number * 100 + index))
            try:
                check(folder, script, num_acknowledged)
            except Exception as error:
                raise AssertionError(
                    f"{script.name}, power lost after {number} ({operation}), luck {chance}: {error}"
                ) from error
            shutil.rmtree(folder)
    return len(trace)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "luck"),
    [
        ("save_with_store", LUCK[1:3]),
        ("save_with_hosts", LUCK[1:2]),
        ("resume_and_save", LUCK[:3]),
    ],
)
def test_power_lost_after_each_operation(
    runner: CrashRunner,
    tmp_path: Path,
    no_syncs: None,
    name: str,
    luck: tuple[float, ...],
) -> None:
    assert check_power_losses(series_of(runner, tmp_path, name), BY_NAME[name], luck) > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", BY_NAME)
def test_power_lost_with_any_luck(runner: CrashRunner, tmp_path: Path, no_syncs: None, name: str) -> None:
    check_power_losses(series_of(runner, tmp_path, name), BY_NAME[name], LUCK * 4)


# A full disk


def check_full_disk(crash: Crash, script: SaveScript) -> None:
    """Check that the newest steps and the best are there and good.

    The script itself went on to its end."""
    path = checkpoints(crash.folder)
    _, skipped = CheckpointStore(path, repair=False).newest_good()
    assert not skipped
    present = {step for step, _ in CheckpointStore(path, repair=False).newest_first()}
    promised = {*script.lasting, *crash.acknowledged}
    expected = set(sorted(promised | present)[-KEEP:]) | (promised & {script.best})
    assert expected <= present, f"present: {sorted(present)}; expected: {expected}"
    store = CheckpointStore(path, keep=KEEP)
    for _, checkpoint in store.newest_first():
        load(checkpoint)
    check_next_save(store, script)


def check_full_disks(series: CrashSeries, script: SaveScript, kinds: list[str]) -> None:
    counts = set()
    faults = [DiskFault(kind, number) for number in series.operations() for kind in kinds]
    for crash in series.run(faults):
        counts.add(len(crash.acknowledged))
        try:
            check_full_disk(crash, script)
        except Exception as error:
            raise AssertionError(f"{script.name}, {crash.fault.kind} at {crash.fault.at}: {error}") from error
    assert len(counts) > 1, "the full disk never made a save fail"


@pytest.mark.extended
def test_disk_full_at_each_operation(runner: CrashRunner, tmp_path: Path, no_syncs: None) -> None:
    check_full_disks(
        series_of(runner, tmp_path, "resume_and_save"),
        BY_NAME["resume_and_save"],
        ["full"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_disk_full_at_each_operation_of_every_script(
    runner: CrashRunner, tmp_path: Path, no_syncs: None, name: str
) -> None:
    check_full_disks(series_of(runner, tmp_path, name), BY_NAME[name], ["full", "full once"])
