"""The verdict on a run: the cause that slowed it, and things to try, from its record alone.

Each cause is a function that returns its finding or None. The first finding is the verdict; the
evidence of the others is added to it.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.report.run.figures.expert_load import busiest_layer, idlest_layer, layer_loads
from orchestrator.report.run.figures.read import RunRecord, cached_on_record
from orchestrator.report.run.findings.finding import MAX_ADVICE, Finding
from orchestrator.report.run.findings.load_findings import (
    balance_advice,
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
from orchestrator.types import counted

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
    steps = counted(record.totals.num_steps, "step")
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


EXPERT_IMBALANCE = 2.0
"""Ratio of the busiest expert to the even share, once the gate has settled."""
IDLE_SHARE = 0.25
"""Part of a layer's experts that are idle."""


def uneven_experts_finding(record: RunRecord) -> Finding | None:
    """Return an expert with far more than its share, or many with none.

    With few experts or a large top-k only the second can occur. It costs little time on one device, but
    experts with few tokens learn little."""
    if record.totals.num_steps < MIN_STEPS:
        return None
    layers = layer_loads(record)
    evidence = []
    busiest = busiest_layer(layers)
    if busiest is not None and busiest[1] >= EXPERT_IMBALANCE:
        layer, ratio = busiest
        evidence.append(f"the busiest expert of layer {layer} receives {ratio:.1f} times its even share")
    idlest = idlest_layer(layers)
    if idlest is not None and idlest[1] >= IDLE_SHARE * idlest[2]:
        layer, num_idle, num_experts = idlest
        evidence.append(f"{num_idle} of {num_experts} experts of layer {layer} receive almost no tokens")
    if not evidence:
        return None
    advice = [balance_advice(record)]
    sizes = {"experts": "fewer --experts", "top_k": "a larger --top-k"}
    changes = [text for name, text in sizes.items() if record.takes(name)]
    if changes:
        advice.append(f"{', or '.join(changes)}, if some stay idle to the end")
    return Finding("uneven experts", tuple(evidence), tuple(advice))
