"""``plan --cluster``: the plan of a run on a cluster, which need not exist, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.cli.predict import predict_plan
from orchestrator.config.reader import Resolved
from orchestrator.errors import OrchestratorError
from orchestrator.plan.cost.described_cluster import (
    CORES_PER_GPU,
    RAM_PER_GPU_MEMORY,
    cluster_of,
    inventory_of,
    larger_clusters,
)
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.scaling import ClusterSpec
from orchestrator.plan.planning import Plan, plan
from orchestrator.types import bytes_text, counted

if TYPE_CHECKING:
    from typing import Any

    from orchestrator.tasks.task import Task
    from orchestrator.train.worker.prepared_run import PreparedRun

ASSUMED_NODE = (
    f"each node is taken to have {CORES_PER_GPU} cores for each GPU, and RAM of {RAM_PER_GPU_MEMORY} times "
    "the memory of its GPUs"
)


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of a run on a cluster, its predicted step as a line and as JSON, and what it lacks."""

    prepared: PreparedRun
    step_line: str
    predicted: dict[str, Any] | None
    shortage: str | None
    """None if one sample fits into the memory of each GPU."""


def plan_on_cluster(
    resolved: Resolved, task: Task, spec: ClusterSpec, machine: Machine, source: str
) -> ClusterPlan:
    from orchestrator.preparation import prepare_run

    prepared = prepare_run(resolved, task, inventory_of(spec), cluster_of(spec), None)
    line, predicted = predict_plan(prepared, machine, 1.0, source)
    return ClusterPlan(prepared, line, predicted, _shortage(prepared, spec))


def _shortage(prepared: PreparedRun, spec: ClusterSpec) -> str | None:
    """Return what the memory of the cluster lacks for one sample, and what would do."""
    memory = prepared.plan.memory
    if memory.fits or memory.limit is None:
        return None
    missing = bytes_text(memory.total - memory.limit)
    found = (
        f"one sample needs {bytes_text(memory.total)} on each of {counted(spec.devices, 'GPU')}, "
        f"{missing} more than the usable {bytes_text(memory.limit)} ({_how(prepared.plan)})"
    )
    enough = _enough(prepared, spec)
    instead = "GPUs with more memory, a shorter --sequence-length, or --lora RANK"
    if enough is None:
        return f"{found}. No number of {spec.gpu.upper()} would do. Try {instead}"
    larger, chosen = enough
    nodes = f" ({larger.nodes} nodes × {larger.gpus})" if larger.nodes > 1 else ""
    return (
        f"{found}. {larger.devices} {spec.gpu.upper()}{nodes} would do: {_how(chosen)}, "
        f"{bytes_text(chosen.memory.total)} on each. Or try {instead}"
    )


def _how(chosen: Plan) -> str:
    """Return the strategy, the sharding and the recomputation of a plan in words."""
    strategy = chosen.strategy.value.replace("_", " ")
    sharding = f" with {chosen.sharding.value}" if chosen.sharding.value != "none" else ""
    recomputed = ", activations recomputed" if chosen.activation_checkpointing.value else ""
    return f"{strategy}{sharding}{recomputed}"


def _enough(prepared: PreparedRun, spec: ClusterSpec) -> tuple[ClusterSpec, Plan] | None:
    """Return the first larger cluster on which one sample fits, with its plan."""
    config = prepared.resolved.config
    for larger in larger_clusters(spec):
        try:
            chosen = plan(config, inventory_of(larger), prepared.facts, None, cluster_of(larger))
        except OrchestratorError:  # the settings forbid so many workers
            return None
        if chosen.memory.fits:
            return larger, chosen
    return None
