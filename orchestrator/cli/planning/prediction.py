"""The predicted step time of a plan: on this machine, or on a cluster, which need not exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.reading.reader import Resolved
from orchestrator.errors import OrchestratorError
from orchestrator.plan.cost.calibration import AGAIN, FILE, Calibration, read_calibration
from orchestrator.plan.cost.cluster_spec import ClusterSpec, cluster_of, inventory_of, machine_of
from orchestrator.plan.cost.devices import known_gpu, short_name
from orchestrator.plan.cost.machine import Machine, Parallelism
from orchestrator.plan.cost.model import HOST_OVERHEAD, StepPrediction, predict
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.host_groups import hosts_of_group
from orchestrator.plan.inventory.hardware import results_folder
from orchestrator.plan.ladder import shortage
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


@dataclass(frozen=True)
class DeviceFigures:
    """The figures that a step is predicted from."""

    machine: Machine
    source: str
    """Where the figures are from, in words."""
    crowding: float = 1.0
    """How far workers on one machine slow each other."""


def machine_figures(prepared: PreparedRun, calibration: Path | None) -> DeviceFigures | None:
    """Return the figures of this machine as it was measured, or as its GPU is known; None without any."""
    on_gpu = prepared.plan.device.value != "cpu"
    workers = prepared.plan.workers.value
    inventory = prepared.inventory
    name = inventory.gpus[0].name if on_gpu else f"{inventory.cpu_name}, {inventory.cores} cores"
    measured = _find_calibration(calibration)
    if measured is not None and measured.machine == name:
        machine, crowding = measured.machine_for(workers)
        return DeviceFigures(machine, f"the calibration of {measured.made[:10]}", crowding)
    gpu = short_name(name) if on_gpu else None
    if gpu is None:
        return None
    known = known_gpu(gpu)
    spec = ClusterSpec(1, max(1, workers), gpu, "nvlink" if known.nvlink_gb_s else "pcie", 100.0, 1)
    return DeviceFigures(machine_of(spec), f"known figures of {known.names[0]}")


def cluster_figures(spec: ClusterSpec, calibration: Path | None) -> DeviceFigures:
    """Return the figures of a cluster: those of a calibration if it is of its GPU, else of the data sheet."""
    measured = _find_calibration(calibration)
    if measured is not None and short_name(measured.machine) == spec.gpu:
        source = f"the calibration of {measured.machine} of {measured.made[:10]}"
        return DeviceFigures(machine_of(spec, measured.profile(1).device), source)
    name = known_gpu(spec.gpu).names[0]
    source = f"data sheet figures of {name} and the shares of them that an H200 achieves"
    return DeviceFigures(machine_of(spec), source)


def _find_calibration(path: Path | None) -> Calibration | None:
    """Read the calibration at a path, or else that of the results folder if it exists."""
    default = results_folder() / FILE
    if path is None and not default.is_file():
        return None
    return read_calibration(path or default)


def prepare_on_cluster(
    resolved: Resolved, task: Task, spec: ClusterSpec, data: TrainingData | None = None
) -> PreparedRun:
    """Plan a run on a cluster; further traces of the task may share ``data``."""
    from orchestrator.preparation import prepare_run

    return prepare_run(resolved, task, inventory_of(spec), cluster_of(spec), None, data)


def shortage_of(prepared: PreparedRun, data: TrainingData | None = None) -> str | None:
    """Return what a plan lacks, with the nearest configuration that fits; None if it fits the memory."""
    from orchestrator.preparation import model_traces, plan_request

    return shortage(plan_request(prepared, model_traces(prepared, data)))


def predict_step(
    prepared: PreparedRun, figures: DeviceFigures | None, data: TrainingData | None = None
) -> tuple[str, dict[str, Any] | None]:
    """Return the predicted step of a plan, as a line for people and as JSON values; None without
    a prediction."""
    plan = prepared.plan
    if figures is None:
        return f"step time: not predicted; {AGAIN.replace('measure again', 'measure this machine')}", None
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
        figures.crowding,
        plan.sharding.value,
        plan.expert_replicas.value,
    )
    prediction = predict(ops, figures.machine, parallelism)
    notes = "; compiled, it may be faster" if plan.compile.value else ""
    if plan.cuda_graph.value:
        notes += "; in a CUDA graph, which has one launch, it may be faster"
    if plan.precision.value == "fp8":
        notes += "; products in fp8 are predicted as in bf16, and faster"
    line = f"step time: {_prediction_text(prediction)} (predicted from {figures.source}{notes})"
    return line, prediction.to_json() | {"memory": plan.memory.to_json(), "source": figures.source}


def _trace_plan(prepared: PreparedRun, data: TrainingData | None) -> MicroBatchOps:
    plan = prepared.plan
    hosts = hosts_of_group(plan) if plan.strategy_facts.divides_experts else 1
    facts = planned_facts(prepared.resolved.config, prepared.facts, plan)
    tracer = tracer_of(prepared, facts, data)
    ops = tracer(plan.batch_size.value, hosts, plan.exchange_chunks.value, plan.workers.value == 1)
    if hosts == 1 and plan.expert_replicas.value > 1:
        # Each host has all experts, and they are still not of the part that all hosts reduce.
        stored_bytes = 4.0 - facts.widened_bytes
        trained_bytes = stored_bytes * (facts.expert_parameters - facts.frozen_experts)
        frozen_bytes = round(facts.expert_weight_bytes * facts.expert_parameters - trained_bytes)
        return replace(
            ops,
            expert_parameters=facts.expert_parameters,
            frozen_experts=facts.frozen_experts,
            frozen_expert_bytes=frozen_bytes,
        )
    return ops


def tracer_of(prepared: PreparedRun, facts: ModelFacts, data: TrainingData | None) -> Tracer:
    """Return the tracer of a planned run, with facts of its model."""
    plan = prepared.plan
    on_gpu = plan.device.value != "cpu"
    precision = plan.precision.value
    # Experts of one size are computed in one operation on the CPU, and where the GPU has a kernel
    # for it.
    capabilities = [gpu.capability for gpu in prepared.inventory.gpus]
    grouped = not on_gpu or (precision in BF16_PRECISIONS and min(capabilities) >= (9, 0))
    recompute = plan.activation_checkpointing.value
    return make_tracer(prepared.task, facts, on_gpu, precision, grouped, recompute, data)


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
        return trace_micro_batch(task, samples, options, shared)

    return trace


def _prediction_text(prediction: StepPrediction) -> str:
    step = seconds_text(prediction.step_seconds)
    speed = f"{speed_text(prediction.samples_per_second)} samples/s"
    limit = prediction.limited_by
    if limit == HOST_OVERHEAD:
        limit += ", the launch of operations"
    return f"{step}, {speed}: {prediction.parts_text()}; limited by {limit}"
