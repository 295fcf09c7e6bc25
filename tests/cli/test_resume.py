"""``kill -9`` at any moment, then ``--resume auto``: the losses are those of a run never killed, to the last bit, and no
checkpoint that was acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.record.events import by_step, of_kind, read_events
from orchestrator.train.checkpoint.store import CheckpointStore
from tests.train.checkpoint.test_store import damage

STEPS = 90
SETTINGS = [
    "--max-steps",
    str(STEPS),
    "--checkpoint-every",
    "3",
    "--log-every",
    "2",
    "--trackers",
    "--no-monitor-gpu",
]
SETTINGS += ["--width", "16", "--expert-hidden-size", "8", "16", "8", "24", "--layers", "1"]


def start(run_dir: Path, *extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator", "train", "--run-dir", str(run_dir), *SETTINGS, *extra]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(e["step"], e["loss"], e["grad_norm"]) for e in by_step(read_events(run_dir / "events.jsonl"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(run_dir))
    assert len(losses(run_dir)) == STEPS
    return losses(run_dir)


def kill_somewhere(
    process: subprocess.Popen[str], run_dir: Path, generator: random.Random, during_save: bool
) -> None:
    """SIGKILL once this process has recorded a few steps: anywhere, or in the middle of writing a checkpoint."""
    events = run_dir / "events.jsonl"
    before = events.stat().st_size if events.exists() else 0
    deadline = time.monotonic() + 200
    wanted = before + generator.randrange(500, 6000)
    while time.monotonic() < deadline and process.poll() is None:
        if (
            events.exists()
            and events.stat().st_size > wanted
            and (not during_save or any(run_dir.glob("checkpoints/.writing*")))
        ):
            break
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def acknowledged(run_dir: Path) -> int:
    return max(
        (event["step"] for event in of_kind(read_events(run_dir / "events.jsonl"), "checkpoint")), default=0
    )


def survive(run_dir: Path, kills: int, seed: int) -> int:
    """Kill the run again and again. Returns how many times it really was in the middle."""
    generator = random.Random(seed)
    killed = 0
    for number in range(kills):
        process = start(run_dir, "--resume", "auto")
        kill_somewhere(process, run_dir, generator, during_save=number % 3 == 1)
        killed += process.returncode == -signal.SIGKILL
        found, skipped = CheckpointStore(run_dir / "checkpoints").newest_good()
        assert not skipped, skipped
        assert (int(found[0].name[5:]) if found else 0) >= acknowledged(run_dir)
    return killed


@pytest.mark.slow
def test_three_kills(tmp_path: Path, undisturbed: list[tuple[int, float, float]]) -> None:
    run_dir = tmp_path / "run"
    assert survive(run_dir, 3, seed=1) >= 2
    finish(start(run_dir, "--resume", "auto"))
    assert losses(run_dir) == undisturbed
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills(tmp_path: Path) -> None:
    long = ["--max-steps", "400"]
    calm, run_dir = tmp_path / "calm", tmp_path / "run"
    finish(start(calm, *long))
    generator = random.Random(20)
    killed = in_save = 0
    for number in range(20):
        process = start(run_dir, "--resume", "auto", *long)
        kill_somewhere(process, run_dir, generator, during_save=number % 3 == 0)
        killed += process.returncode == -signal.SIGKILL
        in_save += any(run_dir.glob("checkpoints/.writing*"))
        found, skipped = CheckpointStore(run_dir / "checkpoints").newest_good()
        assert not skipped, skipped
        assert (int(found[0].name[5:]) if found else 0) >= acknowledged(run_dir)
    finish(start(run_dir, "--resume", "auto", *long))
    assert killed == 20
    assert in_save >= 3
    assert losses(run_dir) == losses(calm)


def test_a_damaged_newest_checkpoint_is_stepped_over(
    tmp_path: Path, undisturbed: list[tuple[int, float, float]]
) -> None:
    run_dir = tmp_path / "run"
    store = CheckpointStore(run_dir / "checkpoints")
    process = start(run_dir)
    while len(store.newest_first()) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    (_, newest), (older_step, older) = store.newest_first()[:2]
    damage(newest, older, random.Random(5))
    output = finish(start(run_dir, "--resume", "auto"))
    assert f"skipped checkpoint {newest.name}" in output
    assert f"resumed at step {older_step}" in output
    assert losses(run_dir) == undisturbed
