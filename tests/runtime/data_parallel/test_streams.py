"""Data that is read in order by workers of Ray Train, on another number of them after each resume, and under
kills: the samples and the losses of one undisturbed process."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator.record.events import of_kind, read_events
from tests.support.cli_runs import complete_run, losses, read_summary
from tests.support.cluster import RayCluster
from tests.support.faults import FaultFolder, FaultSchedule
from tests.support.run_checks import check_sample_counts, check_steps, samples_by_step
from tests.support.streamed_task import streamed_steps, write_digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
SAMPLES = 500
GLOBAL_BATCH = 96
EPOCHS = 4
STEPS = 24
"""Of which every sixth is short: 20 samples."""
ALONE_STEPS = 7


@pytest.mark.parametrize("buffer", [0, pytest.param(128, marks=pytest.mark.slow)])
def test_one_three_and_two_workers_with_kills_see_what_one_process_sees(
    shared_cluster: RayCluster, tmp_path: Path, buffer: int
) -> None:
    file = tmp_path / "digits.jsonl"
    write_digits(file, SAMPLES)
    flags = shlex.split(
        f"--task tests.support.streamed_task:StreamedDigits --data-dir {file} --shuffle-buffer {buffer} "
        f"--epochs {EPOCHS} --evaluate-every 1000 --checkpoint-every 3 --global-batch-size {GLOBAL_BATCH} "
        "--log-every 1 --deterministic"
    )
    run_dir = tmp_path / "run"
    folder = FaultFolder.of_run(run_dir)
    stages = [
        (1, ALONE_STEPS, FaultSchedule()),
        (3, 16, FaultSchedule().kill(1, step=12, phase="forward")),
        # No limit on the steps: the end of the data ends each epoch.
        (2, 10_000, FaultSchedule().kill(0, step=20, phase="forward")),
    ]
    for workers, steps, schedule in stages:
        folder.write(schedule)
        resume = ["--resume", "auto"] if run_dir.exists() else []
        size = ["--workers", str(workers), "--max-steps", str(steps)]
        complete_run(shared_cluster, run_dir, *flags, *size, *resume)
    assert [(fault.rank, fault.step) for fault in folder.fired()] == [(1, 12), (0, 20)]
    events = read_events(run_dir / "events.jsonl")
    assert [event["workers"] for event in of_kind(events, "recovery")] == [3, 2]
    assert read_summary(run_dir)["reason"] == f"{EPOCHS} epochs done"
    assert check_steps(events, STEPS) == []
    assert check_sample_counts(events, SAMPLES) == []
    expected = streamed_steps(file, GLOBAL_BATCH, EPOCHS, buffer)
    seen = samples_by_step(events, folder)
    # A single process records no samples; its losses are compared below.
    assert {step: sorted(ids) for step, ids in seen.items()} == {
        number: sorted(ids) for number, ids in enumerate(expected, 1) if number > ALONE_STEPS
    }
    alone = tmp_path / "alone"
    FaultFolder.of_run(alone).write(FaultSchedule())
    complete_run(None, alone, *flags)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-5)
