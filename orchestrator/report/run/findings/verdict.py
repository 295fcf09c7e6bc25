"""The verdict on a run: the cause that slowed it, and things to try, from its record alone.

Each cause is a function that returns its finding or None. The first finding is the verdict; the
evidence of the others is added to it.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.report.run.figures.read import RunRecord, cached_on_record
from orchestrator.report.run.figures.stats import plural
from orchestrator.report.run.findings.finding import MAX_ADVICE, Finding
from orchestrator.report.run.findings.load_findings import (
    compute_finding,
    imbalance_finding,
    near_limit_finding,
    out_of_memory_finding,
    python_finding,
)
from orchestrator.report.run.findings.time_findings import (
    checkpoint_finding,
    communication_finding,
    data_finding,
    evaluation_finding,
    recovery_finding,
)

MIN_STEPS = 10
"""Fewer steps are mostly start-up costs: no verdict."""

# Ordered by how certain the evidence is and how cheap the cure.
CAUSES: tuple[Callable[[RunRecord], Finding | None], ...] = (
    data_finding,
    recovery_finding,
    evaluation_finding,
    checkpoint_finding,
    communication_finding,
    python_finding,
    imbalance_finding,
    near_limit_finding,
    compute_finding,
)


@cached_on_record
def verdict(record: RunRecord) -> Finding:
    """Return the cause that slowed the run, the numbers that show it, and one to three things to try."""
    # Running out of memory is as clear after one step as after a thousand.
    out_of_memory = out_of_memory_finding(record)
    if out_of_memory is not None:
        return out_of_memory
    if record.totals.num_steps < MIN_STEPS:
        return _too_short(record)
    findings = [finding for cause in CAUSES if (finding := cause(record)) is not None]
    if not findings:
        return _unmeasured(record)
    first, *others = findings
    also = [f"also {finding.kind}: {finding.evidence[0]}" for finding in others if finding.kind != "compute"]
    return Finding(first.kind, (*first.evidence, *also), first.advice[:MAX_ADVICE])


def _too_short(record: RunRecord) -> Finding:
    steps = plural(record.totals.num_steps, "step", "steps")
    return Finding(
        "unknown",
        (f"{steps} recorded; a verdict needs {MIN_STEPS}, since the first ones include start-up costs",),
        (f"run at least {MIN_STEPS} steps: raise --max-steps or --epochs",),
    )


def _unmeasured(record: RunRecord) -> Finding:
    return Finding(
        "unknown",
        (f"{record.totals.num_steps} steps recorded, but neither their phases nor the use of the device",),
        (
            "keep --monitor-gpu on and --gpu-log-interval below the number of steps",
            "--profile traces a few steps, operation by operation",
        ),
    )
