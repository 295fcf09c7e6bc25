"""The checks of disturbed runs: each of them can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.faults import run_checks
from harness.faults.fault_schedule import FaultFolder
from harness.storage.checkpoints import save_checkpoint
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.events.kinds import JsonEvent as Event


def steps(*numbers: int, per_epoch: int = 4, samples: int = 2) -> list[Event]:
    fields = {"event": "step", "loss": 1.0, "grad_norm": 1.0, "samples": samples, "seconds": 0.01}
    return [
        {**fields, "step": number, "epoch": (number - 1) // per_epoch, "time": float(number)}
        for number in numbers
    ]


def test_missing_and_extra_steps_are_found() -> None:
    assert run_checks.check_steps(steps(1, 2, 3, 2, 3, 4), 4) == []
    assert run_checks.check_steps(steps(1, 2, 4, 5), 4) == ["missing steps [3]", "unexpected steps [5]"]


def test_a_loss_that_differs_in_the_last_bit_is_found() -> None:
    other = steps(1, 2)
    other[1]["loss"] = 1.0 + 2**-52
    assert run_checks.check_losses(steps(1, 2), steps(1, 2)) == []
    assert "step 2" in run_checks.check_losses(other, steps(1, 2))[0]
    assert run_checks.check_losses(other, steps(1, 2), relative=1e-5) == []


def test_samples_that_do_not_add_up_are_found() -> None:
    assert run_checks.check_sample_counts(steps(*range(1, 7)), 8) == []
    assert run_checks.check_sample_counts(steps(1, 2, 3, 5, 6), 8) == ["epoch 0: 6 samples of 8"]
    too_many = steps(1, 2, per_epoch=2, samples=5)
    assert run_checks.check_sample_counts(too_many, 8) == ["epoch 0: 10 samples, more than 8"]


def record_samples(
    folder: FaultFolder, pid: int, rank: int, step: int, at: float, ids: list[int], attempt: int = 1
) -> None:
    (folder.folder / "seen").mkdir(parents=True, exist_ok=True)
    record = {"time": at, "rank": rank, "step": step, "attempt": attempt, "pid": pid, "ids": ids}
    with (folder.folder / "seen" / f"{pid}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_of_a_repeated_step_the_last_attempt_counts(tmp_path: Path) -> None:
    """Rank 1 is lost in step 2 of an epoch of two.

    A newcomer repeats the step with rank 0, which survived."""
    folder = FaultFolder(tmp_path)
    events = [*steps(1, 2, 3, per_epoch=2), {"event": "failure", "time": 2.5}]
    for step, at, ids in ((1, 1.0, [0]), (2, 2.0, [1]), (2, 3.0, [1]), (3, 4.0, [2])):
        record_samples(folder, 10, 0, step, at, ids, attempt=int(at))
    record_samples(folder, 11, 1, 1, 1.0, [2])
    record_samples(folder, 11, 1, 2, 2.0, [3])
    record_samples(folder, 12, 1, 2, 3.0, [3])
    record_samples(folder, 12, 1, 3, 4.0, [0])
    assert run_checks.check_samples(events, folder, 4) == []
    record_samples(folder, 12, 1, 3, 4.0, [2])
    problem = "epoch 1: 2 of 4 samples seen, 1 of them more than once"
    assert run_checks.check_samples(events, folder, 4) == [problem]


def test_a_sample_that_no_rank_saw_is_missed(tmp_path: Path) -> None:
    folder = FaultFolder(tmp_path)
    events = steps(1, 2, 3, per_epoch=2)
    for step, ids in ((1, [0, 1]), (2, [2]), (3, [1])):
        record_samples(folder, 10, 0, step, float(step), ids)
    problem = "epoch 0: 3 of 4 samples seen, 0 of them more than once"
    assert run_checks.check_samples(events, folder, 4) == [problem]
    empty = FaultFolder(tmp_path / "empty")
    assert run_checks.check_samples(events, empty, 4) == ["no record of any sample"]


def test_weights_are_compared_bit_by_bit(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 0.0, float("nan")])
    negative_zero = torch.tensor([1.0, -0.0, float("nan")])
    for name, value in (("a", weight), ("b", weight.clone()), ("c", negative_zero)):
        tensors = {"model": {"w": value}, "optimizer": {"exp_avg/w": weight}}
        save_checkpoint(CheckpointStore(tmp_path / name / "checkpoints"), 4, Contents(tensors, {}))
    assert run_checks.check_weights(tmp_path / "a", tmp_path / "b") == []
    assert run_checks.check_weights(tmp_path / "a", tmp_path / "c") == ["model: w differs"]


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_process_that_stays_is_found(monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    monkeypatch.setattr(run_checks, "_EXIT_SECONDS", 0.2)
    assert run_checks.leftover_processes([sleeper]) == [f"process {sleeper} is left: sleep 60"]
    os.kill(sleeper, signal.SIGKILL)
    assert run_checks.leftover_processes([sleeper]) == []


def test_shared_memory_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checks, "_EXIT_SECONDS", 0.2)
    before = run_checks.shared_memory()
    name = f"left-by-a-test-{os.getpid()}"
    path = Path("/dev/shm", name)
    path.write_bytes(b"x")
    try:
        assert f"shared memory {name} is left" in run_checks.leftover_shared_memory(before)
    finally:
        path.unlink()
