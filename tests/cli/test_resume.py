"""Runs killed by SIGKILL at any moment, then continued by ``--resume auto``.

The losses equal those of a run never killed, to the last bit, and no acknowledged checkpoint is
lost.
"""

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

from harness.runs.cli_runs import complete
from harness.runs.records import by_step
from harness.storage.checkpoints import damage
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.files.reading import of_kind, read_events

STEPS = 90
SETTINGS = [
    *("--max-steps", str(STEPS)),
    *("--checkpoint-every", "3"),
    *("--log-every", "2"),
    "--trackers",
    "--no-monitor-gpu",
    *("--evolution", "off"),
    *("--width", "16"),
    *("--expert-hidden-size", "8", "16", "8", "24"),
    *("--layers", "1"),
]
LONGEST_S = 200.0
Losses = list[tuple[int, float, float]]


def arguments_of(run_dir: Path, *extra: str) -> list[str]:
    return ["train", "--run-dir", str(run_dir), *SETTINGS, *extra]


def start(run_dir: Path, *extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments_of(run_dir, *extra)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent
    )


def run_to_end(run_dir: Path, *extra: str) -> str:
    return complete(None, run_dir.parent, arguments_of(run_dir, *extra))


def losses(run_dir: Path) -> Losses:
    """Return step, loss and gradient norm of every step; of a repeated step the last."""
    events = by_step(read_events(run_dir / "events.jsonl"))
    return [(event["step"], event["loss"], event["grad_norm"]) for event in events]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_end(run_dir)
    assert len(losses(run_dir)) == STEPS
    return losses(run_dir)


def kill_at_random(
    process: subprocess.Popen[str], run_dir: Path, generator: random.Random, during_save: bool
) -> None:
    """Send SIGKILL once the process has recorded a few steps: at any moment, or while it writes a
    checkpoint.
    """
    events = run_dir / "events.jsonl"
    size = events.stat().st_size if events.exists() else 0
    wanted = size + generator.randrange(500, 6000)
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and process.poll() is None:
        has_steps = events.exists() and events.stat().st_size > wanted
        if has_steps and (not during_save or is_saving(run_dir)):
            break
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def is_saving(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoints/.writing*"))


def last_acknowledged(run_dir: Path) -> int:
    """Return the step of the newest checkpoint that the record acknowledges."""
    checkpoints = of_kind(read_events(run_dir / "events.jsonl"), "checkpoint")
    return max((event["step"] for event in checkpoints), default=0)


def kill_and_resume(run_dir: Path, kills: int, generator: random.Random, *extra: str) -> tuple[int, int]:
    """Start the run and kill it, so many times; every third kill comes during a save.

    Returns the kills that hit a running process, and those that left an unfinished checkpoint.
    """
    num_killed = 0
    num_in_save = 0
    for number in range(kills):
        process = start(run_dir, "--resume", "auto", *extra)
        kill_at_random(process, run_dir, generator, during_save=number % 3 == 0)
        num_killed += process.returncode == -signal.SIGKILL
        num_in_save += is_saving(run_dir)
        newest, skipped = CheckpointStore(run_dir / "checkpoints").newest_good()
        assert not skipped, skipped
        step = int(newest[0].name.removeprefix("step_")) if newest else 0
        assert step >= last_acknowledged(run_dir)
    return num_killed, num_in_save


@pytest.mark.slow
def test_three_kills_leave_the_losses_unchanged(tmp_path: Path, undisturbed: Losses) -> None:
    run_dir = tmp_path / "run"
    num_killed, _ = kill_and_resume(run_dir, 3, random.Random(1))
    assert num_killed >= 2
    run_to_end(run_dir, "--resume", "auto")
    assert losses(run_dir) == undisturbed
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_leave_the_losses_unchanged(tmp_path: Path) -> None:
    """A longer run, so that every kill hits it, some in the middle of a save."""
    more_steps = ("--max-steps", "400")
    calm_dir = tmp_path / "calm"
    run_dir = tmp_path / "run"
    run_to_end(calm_dir, *more_steps)
    num_killed, num_in_save = kill_and_resume(run_dir, 20, random.Random(20), *more_steps)
    run_to_end(run_dir, "--resume", "auto", *more_steps)
    assert num_killed == 20
    assert num_in_save >= 3
    assert losses(run_dir) == losses(calm_dir)


@pytest.mark.extended
def test_a_damaged_newest_checkpoint_is_skipped(tmp_path: Path, undisturbed: Losses) -> None:
    run_dir = tmp_path / "run"
    store = CheckpointStore(run_dir / "checkpoints")
    process = start(run_dir)
    while len(store.newest_first()) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    (_, newest), (older_step, older) = store.newest_first()[:2]
    damage(newest, older, random.Random(5))
    output = run_to_end(run_dir, "--resume", "auto")
    assert f"skipped checkpoint {newest.name}" in output
    assert f"resumed at step {older_step}" in output
    assert losses(run_dir) == undisturbed
