"""A finding about the quality of the trained model: experts that learn from few tokens."""

from __future__ import annotations

from orchestrator.report.run.figures.expert_load import busiest_layer, idlest_layer, layer_loads
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.findings.finding import Finding
from orchestrator.report.run.findings.load_findings import balance_advice
from orchestrator.report.run.findings.verdict import MIN_STEPS

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
