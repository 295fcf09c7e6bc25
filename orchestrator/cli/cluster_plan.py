"""``plan --cluster``: the plan of a run on a cluster, which need not exist, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.cli.predict import predict_plan
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import OrchestratorError
from orchestrator.plan.cost.cluster_spec import ClusterSpec
from orchestrator.plan.cost.described_cluster import (
    CORES_PER_GPU,
    RAM_PER_GPU_MEMORY,
    cluster_of,
    inventory_of,
    larger_clusters,
)
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.estimate import ModelFacts, largest_fitting
from orchestrator.plan.planning import Plan, plan
from orchestrator.types import bytes_text, counted

if TYPE_CHECKING:
    from typing import Any

    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.tasks.task import Task

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
    """None if a micro-batch fits into the memory of each GPU."""


def plan_on_cluster(
    resolved: Resolved,
    task: Task,
    spec: ClusterSpec,
    machine: Machine,
    source: str,
    data: TrainingData | None = None,
) -> ClusterPlan:
    """Plan a run on a cluster and predict its step; further traces of the task may share ``data``."""
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.preparation import prepare_run

    data = data or TrainingData(task)
    prepared = prepare_run(resolved, task, inventory_of(spec), cluster_of(spec), None, data)
    line, predicted = predict_plan(prepared, machine, 1.0, source, data)
    return ClusterPlan(prepared, line, predicted, _shortage(prepared, spec))


def _shortage(prepared: PreparedRun, spec: ClusterSpec) -> str | None:
    """Return what the memory of the cluster lacks for a micro-batch, and what would do."""
    chosen = prepared.plan
    if chosen.memory.fits or chosen.memory.limit is None:
        return None
    config = prepared.resolved.config
    samples = chosen.batch_size.value
    if samples > 1:
        most = largest_fitting(lambda size: _plan_of_batch(prepared, spec, size).memory, samples)
        if most:
            return f"{_lack(chosen, spec)}. {_smaller_batch(prepared, spec, most)}"
        config = _with_batch(config, 1, None)
        chosen = plan(config, inventory_of(spec), prepared.facts, None, cluster_of(spec))
        if chosen.memory.fits:  # gradients that accumulate need memory too
            only = "At most 1 sample fits, and only without accumulation: use --batch-size 1 alone"
            return f"{_lack(prepared.plan, spec)}. {only}"
    return f"{_lack(chosen, spec)}. {_larger_memory(config, prepared.facts, spec)}"


def _lack(chosen: Plan, spec: ClusterSpec) -> str:
    """Return the memory that the micro-batch of a plan needs, and how much of it is missing."""
    memory = chosen.memory
    usable = memory.limit or 0
    samples = chosen.batch_size.value
    subject = "one sample" if samples == 1 else f"a micro-batch of {samples:,} samples"
    return (
        f"{subject} needs {bytes_text(memory.total)} on each of {counted(spec.devices, 'GPU')}, "
        f"{bytes_text(memory.total - usable)} more than the usable {bytes_text(usable)} ({_how(chosen)})"
    )


def _smaller_batch(prepared: PreparedRun, spec: ClusterSpec, most: int) -> str:
    """Return which batch size fits, and how a step keeps its samples."""
    settings = prepared.resolved.config
    is_given = isinstance(settings.batch.batch_size, int)
    instead = f"--batch-size {most}"
    if settings.run.debug:
        instead += " without --debug"
    elif is_given and settings.run.auto:
        instead += " (or leave it out)"
    if not settings.batch.global_batch_size:
        instead += f", with --global-batch-size {prepared.plan.global_batch_size.value}"
    if settings.batch.accumulation_steps:  # two of the three sizes may be given
        instead += ", without --accumulation-steps,"
    steps = _plan_of_batch(prepared, spec, most).accumulation_steps.value
    fit = "1 sample fits" if most == 1 else f"{most:,} samples fit"
    return f"At most {fit}: use {instead} for the same samples in a step, in {steps} accumulation steps"


def _larger_memory(config: Config, facts: ModelFacts, spec: ClusterSpec) -> str:
    """Return how many GPUs would do for one sample, and what else could help."""
    enough = _enough(config, facts, spec)
    instead = "GPUs with more memory, a shorter --sequence-length, or --lora RANK"
    if enough is None:
        return f"No number of {spec.gpu.upper()} would do. Try {instead}"
    larger, chosen = enough
    nodes = f" ({larger.nodes} nodes × {larger.gpus})" if larger.nodes > 1 else ""
    return (
        f"{larger.devices} {spec.gpu.upper()}{nodes} would do: {_how(chosen)}, "
        f"{bytes_text(chosen.memory.total)} on each. Or try {instead}"
    )


def _plan_of_batch(prepared: PreparedRun, spec: ClusterSpec, size: int) -> Plan:
    """Return the plan with micro-batches of this size and the same samples in a step."""
    global_batch = prepared.plan.global_batch_size.value
    config = _with_batch(prepared.resolved.config, size, global_batch)
    return plan(config, inventory_of(spec), prepared.facts, None, cluster_of(spec))


def _with_batch(config: Config, size: int, global_batch: int | None) -> Config:
    batch = replace(config.batch, batch_size=size, global_batch_size=global_batch, accumulation_steps=None)
    return replace(config, batch=batch, run=replace(config.run, debug=False))


def _how(chosen: Plan) -> str:
    """Return the strategy, the sharding and the recomputation of a plan in words."""
    strategy = chosen.strategy.value.replace("_", " ")
    sharding = f" with {chosen.sharding.value}" if chosen.sharding.value != "none" else ""
    recomputed = ", activations recomputed" if chosen.activation_checkpointing.value else ""
    return f"{strategy}{sharding}{recomputed}"


def _enough(config: Config, facts: ModelFacts, spec: ClusterSpec) -> tuple[ClusterSpec, Plan] | None:
    """Return the first larger cluster on which one sample fits, with its plan."""
    for larger in larger_clusters(spec):
        try:
            chosen = plan(config, inventory_of(larger), facts, None, cluster_of(larger))
        except OrchestratorError:  # the settings forbid so many workers
            return None
        if chosen.memory.fits:
            return larger, chosen
    return None
