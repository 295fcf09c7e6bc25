"""Data that is read in order by workers of Ray Train, on another number of them after each resume, and under
kills: the samples and the losses of one undisturbed process."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.faults.fault_schedule import FaultFolder, FaultSchedule
from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import complete_run, losses
from harness.runs.streamed_runs import GLOBAL_BATCH, check_streamed, streamed_flags
from orchestrator.record.files.reading import of_kind

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ALONE_STEPS = 7


@pytest.mark.extended
@pytest.mark.parametrize("buffer", [0, pytest.param(128, marks=pytest.mark.slow)])
def test_one_three_and_two_workers_with_kills_see_what_one_process_sees(
    shared_cluster: RayCluster, tmp_path: Path, buffer: int
) -> None:
    file = tmp_path / "digits.jsonl"
    settings = f"--checkpoint-every 3 --global-batch-size {GLOBAL_BATCH} --log-every 1 --deterministic"
    flags = [*streamed_flags(file, buffer), *settings.split()]
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
    events = check_streamed(run_dir, file, buffer, unrecorded=ALONE_STEPS)
    assert [event["workers"] for event in of_kind(events, "recovery")] == [3, 2]
    alone = tmp_path / "alone"
    FaultFolder.of_run(alone).write(FaultSchedule())
    complete_run(None, alone, *flags)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-5)
