"""Killed and hung expert hosts on GPUs: CUDA's memory is freed, survivors keep their processes, and the
run continues with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.faults.chaos_runs import FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultFolder, FaultSchedule, Phase
from harness.faults.run_checks import check_steps, check_survivors, recoveries
from harness.faults.stuck_cases import (
    HUNG_IN_TURN,
    READS_WHILE_A_PEER_HANGS,
    READS_WHILE_A_PEER_IS_SLOW,
    SLOW_EVERYWHERE,
    StuckCase,
    check_case,
    run_case,
    seconds_to_detect,
)
from harness.hosts.cluster import local_cluster
from harness.hosts.gpu_ranks import skip_without
from harness.runs.cli_runs import read_summary
from orchestrator.record.files.reading import of_kind

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(500)]
KILL_STEPS = 60
GPUS = 3


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Two hosts and a spare. On a machine with fewer GPUs every process sees the same one."""
    skip_without(request.param, GPUS)
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < GPUS:
            patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        with local_cluster(cpus=6, gpus=GPUS) as cluster:
            flags = ("--backend", request.param, "--gpu-mode", "multi_gpu")
            yield Job(KILL_STEPS, hosts=2, spares=1, cluster=cluster, extra=flags)


@pytest.fixture(scope="module")
def calm(job: Job, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = run_with_faults(job, tmp_path_factory.mktemp("calm") / "run", FaultSchedule())
    assert run.problems(run, KILL_STEPS) == []
    return run


def test_killed_hosts_cost_nothing_on_a_gpu(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    schedule = FaultSchedule().kill(1, step=23).kill(0, step=37, phase="exchange").kill((0, 1), step=48)
    run = run_with_faults(job, tmp_path / "run", schedule)
    assert run.problems(calm, KILL_STEPS) == []
    assert (len(run.fired), len(recoveries(run.events))) == (4, 3)
    assert [recovery["source"] for recovery in recoveries(run.events)] == ["memory"] * 3
    assert read_summary(run.run_dir)["device"] == read_summary(calm.run_dir)["device"] != "cpu"


def test_killed_hosts_come_back_with_their_shards(job: Job, tmp_path: Path) -> None:
    sharded = replace(job, extra=(*job.extra, "--sharding", "zero3"))
    calm = run_with_faults(sharded, tmp_path / "calm", FaultSchedule())
    schedule = FaultSchedule().kill(1, step=23).kill(0, step=37, phase="snapshot").kill((0, 1), step=48)
    run = run_with_faults(sharded, tmp_path / "run", schedule)
    assert run.problems(calm, KILL_STEPS) == []
    assert (len(run.fired), len(recoveries(run.events))) == (4, 3)
    assert [recovery["source"] for recovery in recoveries(run.events)] == ["memory"] * 3


def test_a_standby_that_has_rehearsed_takes_over(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    """It rehearses after the first segment of the others, which takes seconds."""
    schedule = FaultSchedule().kill(1, step=40)
    run = run_with_faults(replace(job, pace_s=0.5), tmp_path / "run", schedule)
    assert run.problems(calm, KILL_STEPS) == []
    (recovery,) = recoveries(run.events)
    (failure,) = of_kind(run.events, "failure")
    later = [
        round(step["seconds"], 2) for step in of_kind(run.events, "step") if step["time"] > failure["time"]
    ]
    parts = {name: round(recovery[name], 2) for name in recovery if name.endswith("_seconds")}
    print(parts, "first steps after it, 0.5 s of sleep included:", later[:3])  # noqa: T201


def test_an_aborted_exchange_harms_no_survivor(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    """The survivor keeps its process and its CUDA context, whatever its device was waiting for."""
    schedule = FaultSchedule()
    phases: tuple[Phase, ...] = ("counts", "exchange", "backward", "gradients", "snapshot")
    for number, phase in enumerate(phases):
        schedule = schedule.kill(1, step=11 + 10 * number, phase=phase)
    run = run_with_faults(job, tmp_path / "run", schedule)
    assert run.problems(calm, KILL_STEPS) == []
    assert check_survivors(FaultFolder.of_run(run.run_dir), hosts=2) == []
    assert [fault.phase for fault in run.fired] == list(phases)
    assert len(recoveries(run.events)) == len(phases)


@pytest.mark.slow
def test_survivors_train_on_for_five_minutes_after_three_kills(job: Job, tmp_path: Path) -> None:
    """torch's watchdog of NCCL would end them after one."""
    pace_s = 0.5
    schedule = FaultSchedule().kill(1, step=8).kill(1, step=16).kill(1, step=24)
    long_job = replace(job, steps=24 + round(320 / pace_s), pace_s=pace_s)
    run = run_with_faults(long_job, tmp_path / "run", schedule)
    assert run.exit_code == 0, run.output[-2000:]
    assert check_survivors(FaultFolder.of_run(run.run_dir), hosts=2) == []
    assert len(recoveries(run.events)) == 3
    last_recovery = recoveries(run.events)[-1]["time"]
    steps = of_kind(run.events, "step")
    assert steps[-1]["time"] - last_recovery > 300.0


def test_slow_hosts_are_waited_for(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    run = run_case(job, tmp_path, SLOW_EVERYWHERE)
    assert check_case(run, SLOW_EVERYWHERE, calm.events) == []


def test_hung_hosts_are_replaced_within_the_timeout(job: Job, calm: FinishedRun, tmp_path: Path) -> None:
    run = run_case(job, tmp_path, HUNG_IN_TURN)
    assert check_case(run, HUNG_IN_TURN, calm.events) == []
    print("seconds to detect:", [round(seconds, 1) for seconds in seconds_to_detect(run)])  # noqa: T201


@pytest.mark.parametrize("case", [READS_WHILE_A_PEER_IS_SLOW, READS_WHILE_A_PEER_HANGS], ids=["slow", "hung"])
def test_a_host_that_reads_from_its_device_while_a_peer_is_late_stays(
    job: Job, calm: FinishedRun, tmp_path: Path, case: StuckCase
) -> None:
    """Its main thread waits in ``.item()``, and CUDA's calls of other threads wait for it."""
    run = run_case(job, tmp_path, case)
    assert check_case(run, case, calm.events) == []


@pytest.mark.slow
def test_steps_of_fifteen_seconds_are_steps(job: Job, tmp_path: Path) -> None:
    """With the default timeout of 10 s."""
    slow_job = replace(job, steps=10, pace_s=15.0)
    run = run_with_faults(slow_job, tmp_path / "run", FaultSchedule())
    assert run.exit_code == 0, run.output[-2000:]
    assert check_steps(run.events, 10) == []
    assert of_kind(run.events, "failure") == []
