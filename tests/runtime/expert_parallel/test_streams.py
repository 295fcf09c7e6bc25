"""Data that is read in order, on another number of hosts after each resume, and under kills: the samples and
the losses of one undisturbed process."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.record.events import by_step, of_kind, read_events
from tests.support.chaos_runs import SETTINGS, Job, run_with_faults
from tests.support.cli_runs import complete, read_summary
from tests.support.cluster import RayCluster
from tests.support.faults import FaultFolder, FaultSchedule
from tests.support.run_checks import (
    check_sample_counts,
    check_samples,
    check_steps,
    samples_by_step,
)
from tests.support.streamed_task import streamed_steps, write_digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
SAMPLES = 500
GLOBAL_BATCH = 96
EPOCHS = 4
STEPS = 24
"""Of which every sixth is short: 20 samples."""


@pytest.mark.parametrize("buffer", [128, pytest.param(0, marks=pytest.mark.slow)])
def test_one_three_and_two_hosts_with_kills_see_what_one_process_sees(
    shared_cluster: RayCluster, tmp_path: Path, buffer: int
) -> None:
    file = tmp_path / "digits.jsonl"
    write_digits(file, SAMPLES)
    flags = shlex.split(
        f"--task tests.support.streamed_task:StreamedDigits --data-dir {file} --shuffle-buffer {buffer} "
        f"--epochs {EPOCHS} --evaluate-every 1000"
    )
    job = Job(7, hosts=1, spares=0, snapshot_every=2, checkpoint_every=3, cluster=shared_cluster)
    run_dir = tmp_path / "run"
    stages = [
        (job, FaultSchedule()),
        (replace(job, hosts=3, steps=16), FaultSchedule().kill(1, step=12)),
        # No limit on the steps: the end of the data ends each epoch.
        (replace(job, hosts=2, steps=10_000), FaultSchedule().kill(0, step=20)),
    ]
    run = None
    for stage, schedule in stages:
        resume = ["--resume", "auto"] if run_dir.exists() else []
        run = run_with_faults(stage, run_dir, schedule, *flags, *resume)
        assert run.exit_code == 0, run.output[-3000:]
    assert run is not None
    assert [fault.step for fault in run.fired] == [12, 20]
    events = read_events(run_dir / "events.jsonl")
    assert len(of_kind(events, "recovery")) == 2
    assert read_summary(run_dir)["reason"] == f"{EPOCHS} epochs done"
    assert check_steps(events, STEPS) == []
    assert check_sample_counts(events, SAMPLES) == []
    folder = FaultFolder.of_run(run_dir)
    assert check_samples(events, folder, SAMPLES) == []
    expected = streamed_steps(file, GLOBAL_BATCH, EPOCHS, buffer)
    seen = samples_by_step(events, folder)
    assert {step: sorted(ids) for step, ids in seen.items()} == {
        number: sorted(ids) for number, ids in enumerate(expected, 1)
    }
    alone = tmp_path / "alone"
    FaultFolder.of_run(alone).write(FaultSchedule(), 0.0)
    complete(
        None, tmp_path, ["train", *SETTINGS, *flags, "--parallel-strategy", "auto", "--run-dir", str(alone)]
    )
    expected_losses = [event["loss"] for event in by_step(read_events(alone / "events.jsonl"))]
    assert [event["loss"] for event in by_step(events)] == pytest.approx(expected_losses, rel=1e-5)
