"""Data that is read in order, on another number of hosts after each resume, and under kills: the samples and
the losses of one undisturbed process."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults.chaos_runs import SETTINGS, Job, run_with_faults
from harness.faults.fault_schedule import FaultFolder, FaultSchedule
from harness.faults.run_checks import check_sample_counts, check_samples, check_steps, samples_by_step
from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import complete, losses, read_summary
from harness.runs.streamed_task import streamed_steps, write_digits
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
SAMPLES = 500
GLOBAL_BATCH = 96
_EPOCHS = 4
_STEPS = 24
"""Of which every sixth is short: 20 samples."""


def streamed_flags(file: Path, buffer: int) -> list[str]:
    """Write the data, and return the flags of a run that reads it in order."""
    write_digits(file, SAMPLES)
    return shlex.split(
        f"--task harness.runs.streamed_task:StreamedDigits --data-dir {file} --shuffle-buffer {buffer} "
        f"--epochs {_EPOCHS} --evaluate-every 1000"
    )


def check_streamed(run_dir: Path, file: Path, buffer: int) -> list[Event]:
    """Assert that the run saw the samples of one process in each step. Return its events."""
    events = read_events(run_dir / "events.jsonl")
    assert read_summary(run_dir)["reason"] == f"{_EPOCHS} epochs done"
    assert check_steps(events, _STEPS) == []
    assert check_sample_counts(events, SAMPLES) == []
    expected = streamed_steps(file, GLOBAL_BATCH, _EPOCHS, buffer)
    seen = samples_by_step(events, FaultFolder.of_run(run_dir))
    assert {step: sorted(ids) for step, ids in seen.items()} == {
        number: sorted(ids) for number, ids in enumerate(expected, 1)
    }
    return events


@pytest.mark.extended
@pytest.mark.parametrize("buffer", [128, pytest.param(0, marks=pytest.mark.slow)])
def test_one_three_and_two_hosts_with_kills_see_what_one_process_sees(
    shared_cluster: RayCluster, tmp_path: Path, buffer: int
) -> None:
    file = tmp_path / "digits.jsonl"
    flags = streamed_flags(file, buffer)
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
    first, second = (fault.step for fault in run.fired)
    assert first == 12
    assert second in (20, 21), "a busy host may end a step before it is killed"
    events = check_streamed(run_dir, file, buffer)
    assert len(of_kind(events, "recovery")) == 2
    assert check_samples(events, FaultFolder.of_run(run_dir), SAMPLES) == []
    alone = tmp_path / "alone"
    FaultFolder.of_run(alone).write(FaultSchedule(), 0.0)
    complete(
        None, tmp_path, ["train", *SETTINGS, *flags, "--parallel-strategy", "auto", "--run-dir", str(alone)]
    )
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-5)
