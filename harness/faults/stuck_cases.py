"""Hosts that are slow and must be waited for, and hosts that hang and must be replaced.

The same cases run over gloo on CPUs and over NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.faults.chaos_runs import FinishedRun, Job, run_with_faults
from harness.faults.fault_schedule import FaultKind, FaultSchedule, Phase
from harness.faults.run_checks import check_losses, check_steps
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind

TIMEOUT_S = 4
"""``--collective-timeout`` of the runs."""
LONG_S = 3.0 * TIMEOUT_S
STEPS = 12
HUNG_RANK = 1
_STEP = 6


@dataclass(frozen=True)
class StuckCase:
    """A fault, and whether it is to cost the host that it hits."""

    schedule: FaultSchedule
    lost: bool
    extra: tuple[str, ...] = ()
    steps: int = STEPS
    pace_s: float = 0.0


def _slow(kind: FaultKind, phase: Phase, extra: tuple[str, ...] = ()) -> StuckCase:
    return StuckCase(FaultSchedule().delay(kind, HUNG_RANK, LONG_S, _STEP, phase), lost=False, extra=extra)


def _hung(kind: FaultKind) -> StuckCase:
    return StuckCase(FaultSchedule().delay(kind, HUNG_RANK, None, _STEP), lost=True)


_SAVES = ("--checkpoint-every", "6", "--snapshot-every", "6")
CASES = {
    "steps of 3 times the timeout": StuckCase(FaultSchedule(), lost=False, steps=4, pace_s=LONG_S),
    "one host slow in its data": _slow("delay", "data"),
    "a recompilation late in the run": _slow("compile", "forward"),
    "a slow batch of an evaluation": _slow("delay", "evaluate", extra=("--evaluate-every", "6")),
    "a slow checkpoint": _slow("delay", "checkpoint", extra=_SAVES),
    "a slow snapshot": _slow("delay", "snapshot", extra=_SAVES),
    "SIGSTOP": StuckCase(FaultSchedule().stop(HUNG_RANK, step=_STEP), lost=True),
    "a loop that holds the interpreter lock": _hung("gil"),
    "a host that sleeps for ever in a step": _hung("delay"),
}
"""By name. A step of 12 s with a timeout of 4 s is slow for all hosts; the others for one."""


SLOW_EVERYWHERE = StuckCase(
    FaultSchedule()
    .delay("delay", HUNG_RANK, LONG_S, step=3, phase="data")
    .delay("compile", HUNG_RANK, LONG_S, step=5)
    .delay("delay", HUNG_RANK, LONG_S, step=6, phase="evaluate")
    .delay("delay", HUNG_RANK, LONG_S, step=7, phase="checkpoint")
    .delay("delay", HUNG_RANK, LONG_S, step=9, phase="snapshot"),
    lost=False,
    extra=("--evaluate-every", "6", *_SAVES),
    steps=14,
)
"""Every slow case in one run."""
HUNG_IN_TURN = StuckCase(
    FaultSchedule()
    .stop(HUNG_RANK, step=4)
    .delay("gil", HUNG_RANK, None, step=10)
    .delay("kernel", HUNG_RANK, None, step=16)
    .delay("delay", HUNG_RANK, None, step=22),
    lost=True,
    steps=30,
)
"""Every hung case in one run, on GPUs: each replacement hangs in another way."""


_READS = ("--task", "harness.faults.faulty_task:ReadingDigits")
READS_WHILE_A_PEER_IS_SLOW = StuckCase(
    FaultSchedule().delay("compile", HUNG_RANK, LONG_S, _STEP, phase="exchange"), lost=False, extra=_READS
)
"""The other hosts wait in a copy of a value from the device, not in a wait of ours."""
READS_WHILE_A_PEER_HANGS = StuckCase(
    FaultSchedule().delay("delay", HUNG_RANK, None, _STEP, phase="exchange"), lost=True, extra=_READS
)


def run_case(job: Job, folder: Path, case: StuckCase) -> FinishedRun:
    job = replace(
        job,
        steps=case.steps,
        collective_timeout=TIMEOUT_S,
        pace_s=case.pace_s,
        extra=(*job.extra, *case.extra),
    )
    return run_with_faults(job, folder / "run", case.schedule, timeout=300.0)


def check_case(run: FinishedRun, case: StuckCase, calm: Sequence[Event]) -> list[str]:
    """Return what is wrong: a run that failed, other losses, a healthy host that was replaced."""
    if run.exit_code:
        return [f"ended with code {run.exit_code}: {run.output[-2000:]}"]
    problems = [*check_steps(run.events, case.steps), *check_losses(run.events, calm)]
    if len(run.fired) != len(case.schedule.faults):
        problems.append(f"{len(run.fired)} of {len(case.schedule.faults)} faults happened")
    failures = [(event["rank"], event["message"]) for event in of_kind(run.events, "failure")]
    expected_ranks = [HUNG_RANK] * len(case.schedule.faults) if case.lost else []
    if [rank for rank, _ in failures] != expected_ranks:
        problems.append(f"failures of ranks {expected_ranks} were expected, and seen were: {failures}")
    return problems


def seconds_to_detect(run: FinishedRun) -> list[float]:
    """Return the seconds from each fault to its detection."""
    failures = of_kind(run.events, "failure")
    return [event["time"] - fault.time for event, fault in zip(failures, run.fired, strict=False)]
