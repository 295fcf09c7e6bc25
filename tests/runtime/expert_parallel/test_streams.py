"""Data that is read in order, on another number of hosts after each resume, and under kills: the samples and
the losses of one undisturbed process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults.chaos_runs import SETTINGS, Job, run_with_faults
from harness.faults.fault_schedule import FaultFolder, FaultSchedule
from harness.faults.run_checks import check_samples
from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import complete, losses
from harness.runs.streamed_runs import SAMPLES, check_streamed, streamed_flags
from orchestrator.record.files.reading import of_kind

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


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
