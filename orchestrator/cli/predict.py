"""The predicted step time of a plan on this machine, from its calibration or from known figures
of its GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.calibrate import find_calibration
from orchestrator.errors import OrchestratorError
from orchestrator.plan.cost.calibration import AGAIN, Calibration
from orchestrator.plan.cost.cluster_spec import ClusterSpec, machine_of
from orchestrator.plan.cost.devices import known_gpu, short_name
from orchestrator.plan.cost.machine import Machine, Parallelism
from orchestrator.plan.cost.model import HOST_OVERHEAD, StepPrediction, predict
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.host_groups import hosts_of_group
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import planned_facts
from orchestrator.types import BF16_PRECISIONS, PrecisionName, seconds_text, speed_text

if TYPE_CHECKING:
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.plan.cost.ops import MicroBatchOps
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.tasks.task import Task

Tracer = Callable[[int, int, int, bool], "MicroBatchOps"]
"""Returns the operations of a micro-batch, for a number of samples, expert hosts, chunks of the token
exchange, and whether one device computes alone."""


def step_prediction(prepared: PreparedRun, calibration: Path | None) -> tuple[str, dict[str, Any] | None]:
    """Return the predicted step of a plan, as a line for people and as JSON values; None without
    a prediction."""
    plan = prepared.plan
    on_gpu = plan.device.value != "cpu"
    workers = plan.workers.value
    described = _describe_machine(find_calibration(calibration), prepared.inventory, on_gpu, workers)
    if described is None:
        return f"step time: not predicted; {AGAIN.replace('measure again', 'measure this machine')}", None
    return predict_plan(prepared, *described)


def predict_plan(
    prepared: PreparedRun, machine: Machine, crowding: float, source: str, data: TrainingData | None = None
) -> tuple[str, dict[str, Any] | None]:
    """Return the predicted step of a plan on a machine, as ``step_prediction`` does."""
    plan = prepared.plan
    try:
        ops = _trace_plan(prepared, data)
    except OrchestratorError:
        raise
    except Exception as error:  # a model that cannot be traced without data has a plan, but no prediction
        return f"step time: not predicted, the model cannot be traced ({type(error).__name__})", None
    parallelism = Parallelism(
        plan.workers.value,
        plan.strategy.value,
        plan.accumulation_steps.value,
        1.0,
        plan.exchange_chunks.value,
        plan.tf32.value,
        crowding,
        plan.sharding.value,
        plan.expert_replicas.value,
    )
    prediction = predict(ops, machine, parallelism)
    notes = "; compiled, it may be faster" if plan.compile.value else ""
    if plan.cuda_graph.value:
        notes += "; in a CUDA graph, which has one launch, it may be faster"
    if plan.precision.value == "fp8":
        notes += "; products in fp8 are predicted as in bf16, and faster"
    line = f"step time: {_prediction_text(prediction)} (predicted from {source}{notes})"
    return line, prediction.to_json() | {"source": source}


def _trace_plan(prepared: PreparedRun, data: TrainingData | None) -> MicroBatchOps:
    plan = prepared.plan
    on_gpu = plan.device.value != "cpu"
    precision = plan.precision.value
    hosts = hosts_of_group(plan) if plan.strategy_facts.divides_experts else 1
    # Experts of one size are computed in one operation on the CPU, and where the GPU has a kernel
    # for it.
    capabilities = [gpu.capability for gpu in prepared.inventory.gpus]
    grouped = not on_gpu or (precision in BF16_PRECISIONS and min(capabilities) >= (9, 0))
    facts = planned_facts(prepared.resolved.config, prepared.facts, plan)
    recompute = plan.activation_checkpointing.value
    tracer = make_tracer(prepared.task, facts, on_gpu, precision, grouped, recompute, data)
    ops = tracer(plan.batch_size.value, hosts, plan.exchange_chunks.value, plan.workers.value == 1)
    if hosts == 1 and plan.expert_replicas.value > 1:
        # Each host has all experts, and they are still not of the part that all hosts reduce.
        frozen_bytes = round(ops.frozen_bytes * facts.frozen_experts / max(1, ops.frozen))
        return replace(
            ops,
            expert_parameters=facts.expert_parameters,
            frozen_experts=facts.frozen_experts,
            frozen_expert_bytes=frozen_bytes,
        )
    return ops


def make_tracer(
    task: Task,
    facts: ModelFacts,
    on_gpu: bool,
    precision: PrecisionName,
    grouped: bool,
    recompute: bool,
    data: TrainingData | None = None,
) -> Tracer:
    """Return a function that traces a micro-batch of the task; each combination is traced once.

    ``facts`` have the settings that take or save memory; their copies of weights are those of one device
    that computes alone. All traces share ``data``."""
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch

    shared = data or TrainingData(task)
    recompute_experts = facts.recomputes_experts

    @cache
    def trace(samples: int, hosts: int, chunks: int, alone: bool) -> MicroBatchOps:
        copies = alone and facts.copied_experts > 0
        options = TraceOptions(
            on_gpu, precision, grouped, hosts, chunks, recompute, recompute_experts, copies
        )
        ops = trace_micro_batch(task, samples, options, shared)
        return replace(ops, moments=facts.moments, averages=facts.averages)

    return trace


def _describe_machine(
    calibration: Calibration | None, inventory: Inventory, on_gpu: bool, workers: int
) -> tuple[Machine, float, str] | None:
    """Return this machine as measured or as its GPU is known, how far the workers slow each
    other, and the source."""
    name = inventory.gpus[0].name if on_gpu else f"{inventory.cpu_name}, {inventory.cores} cores"
    if calibration is not None and calibration.machine == name:
        machine, crowding = calibration.machine_for(workers)
        return machine, crowding, f"the calibration of {calibration.made[:10]}"
    gpu = short_name(name) if on_gpu else None
    if gpu is None:
        return None
    known = known_gpu(gpu)
    spec = ClusterSpec(1, max(1, workers), gpu, "nvlink" if known.nvlink_gb_s else "pcie", 100.0, 1)
    return machine_of(spec), 1.0, f"known figures of {known.names[0]}"


def _prediction_text(prediction: StepPrediction) -> str:
    step = seconds_text(prediction.step_seconds)
    speed = f"{speed_text(prediction.samples_per_second)} samples/s"
    limit = prediction.limited_by
    if limit == HOST_OVERHEAD:
        limit += ", the launch of operations"
    return f"{step}, {speed}: {prediction.parts_text()}; limited by {limit}"
