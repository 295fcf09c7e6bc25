"""``plan --cluster``: the plan and the predicted scaling table of a cluster, which need not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.calibrate import find_calibration
from orchestrator.cli.cluster_plan import ASSUMED_NODE, plan_on_cluster
from orchestrator.cli.plan_tables import print_plan
from orchestrator.cli.predict import Tracer, make_tracer
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.compute import with_memory_settings, with_weight_copies
from orchestrator.plan.cost.cluster_spec import ClusterSpec, machine_of, nodes_of, parse_cluster
from orchestrator.plan.cost.devices import known_gpu, short_name
from orchestrator.plan.cost.machine import DeviceCosts, Machine, Parallelism
from orchestrator.plan.cost.model import HOST_OVERHEAD, predicted_memory
from orchestrator.plan.cost.scaling import (
    IMBALANCE,
    ScalingJob,
    ScalingRow,
    by_kind,
    scaling_rows,
)
from orchestrator.plan.estimate import ModelFacts
from orchestrator.types import BF16_PRECISIONS, PrecisionName, bytes_text, counted, seconds_text, speed_text

if TYPE_CHECKING:
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.tasks.task import Task

COLUMNS = (
    "devices", "batch", "step", "samples/s", "speed-up", "efficiency", "memory", "limited by", "made of",
)  # fmt: skip
_LEFT_ALIGNED = ("made of", "limited by")
_TITLES = {
    "weak": "weak scaling: as many samples on each device",
    "strong": "strong scaling: one global batch for all",
}
_MAX_DEFAULT_BATCH = 64
"""Most samples of a micro-batch, if none were asked for."""
_STRONG_MICRO_BATCHES = 64
"""Micro-batches of the global batch of strong scaling, if no global batch was asked for."""
_FILE_COLUMNS = 150
"""Width of the table if the output is not a terminal."""
_DEVICE = "cuda:0"


def show_cluster(
    resolved: Resolved, text: str, calibration: Path | None, as_json: bool, show_all: bool = False
) -> int:
    """Print the plan and the predicted scaling table of the cluster that a text describes."""
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.tasks.load import load_task

    spec = parse_cluster(text)
    with Console(stderr=True).status("tracing the model …") as status:
        task = load_task(resolved.config)
        data = TrainingData(task)
        machine, source = _cluster_machine(spec, calibration)
        planned = plan_on_cluster(resolved, task, spec, machine, source, data)
        status.update("predicting the scaling …")
        recompute = planned.prepared.plan.activation_checkpointing.value
        job = _cluster_job(resolved.config, task, planned.prepared.facts, spec, machine, recompute, data)
        rows = scaling_rows(job, machine)
    from orchestrator.run.prepared_run import plan_json

    network = _network_text(spec)
    notes = [*_assumptions(resolved, spec, job), ASSUMED_NODE]
    if any(row.predicted.limited_by == HOST_OVERHEAD for row in rows):
        notes.append(
            f"{HOST_OVERHEAD} is the time in which a host launches operations more slowly than its device "
            "computes them; where it is the limit, a faster device would gain little"
        )
    if as_json:
        content = plan_json(planned.prepared) | {
            "predicted": planned.predicted,
            "shortage": planned.shortage,
            "cluster": spec.text(),
            "network": network,
            "source": source,
            "notes": notes,
            "rows": [row.to_json() for row in rows],
        }
        Console().print_json(json.dumps(content, default=str))
        return ResourceError.exit_code if planned.shortage else 0
    console = Console() if Console().is_terminal else Console(width=_FILE_COLUMNS)
    console.print(Text(f"cluster: {spec.text()}; {network}"), soft_wrap=True)
    print_plan(console, planned.prepared, planned.step_line, show_all)
    for (kind, strategy), group in by_kind(rows).items():
        title = f"{spec.text()}; {strategy.replace('_', ' ')}, {_TITLES[kind]}"
        console.print(_scaling_table(title, group, spec))
    console.print(Text("\n".join([f"predicted from {source}", *notes])), soft_wrap=True)
    if planned.shortage is not None:  # last, because the plan above explains it
        raise ResourceError(planned.shortage)
    return 0


def _network_text(spec: ClusterSpec) -> str:
    """Return where the figures of the network between nodes come from, and how to give others."""
    if spec.node is not None:
        source = f"that of {spec.node} nodes"
    else:
        source = "no node with such GPUs is known" if spec.network_assumed else "as given"
    if not spec.network_assumed:
        return f"the network is {source}"
    others = [f"node={name}" for name in nodes_of(spec.gpu) if name != spec.node]
    choices = " or ".join([*(others and [", ".join(others)]), "net=100gbit,nics=1"])
    return f"the network is assumed ({source}): for another add {choices} to --cluster"


def _assumptions(resolved: Resolved, spec: ClusterSpec, job: ScalingJob) -> list[str]:
    """Return notes: what the tables assume, why they end where they do, and which flags they do not use."""
    notes: list[str] = []
    if job.experts and spec.devices > 1:
        notes.append(
            f"the busiest device's experts are taken to have {IMBALANCE - 1:.0%} more rows than the mean"
        )
    if 0 < job.experts < spec.devices:
        notes.append(
            f"expert parallel has at most {job.experts} devices: there are as many experts, "
            "and each device holds one at least"
        )
    if job.samples is not None and job.samples < job.micro_batch * spec.devices:
        notes.append(
            f"weak scaling on more than {counted(job.samples // job.micro_batch, 'device')} needs more data: "
            f"each takes {counted(job.micro_batch, 'sample')} of a step, and the data has {job.samples:,}"
        )
    if job.global_batch < spec.devices:
        notes.append(
            f"strong scaling has at most {job.global_batch} devices: its global batch has as many samples"
        )
    if resolved.origin("workers") != "default":
        workers = resolved.config.parallel.workers
        notes.append(f"the tables do not use --workers {workers}: they have a row for each number of devices")
    return notes


# --- the prediction


def cluster_rows(
    config: Config, spec: ClusterSpec, calibration: Path | None = None
) -> tuple[list[ScalingRow], str]:
    """Return the rows of the table, and the source of the device's figures."""
    from orchestrator.measure.tracing.model_facts import model_facts
    from orchestrator.tasks.load import load_task

    task = load_task(config)
    machine, source = _cluster_machine(spec, calibration)
    facts = model_facts(task, _DEVICE, _precision(config, known_gpu(spec.gpu).capability))
    recompute = config.device.activation_checkpointing == "on"
    job = _cluster_job(config, task, facts, spec, machine, recompute)
    return scaling_rows(job, machine), source


def _cluster_machine(spec: ClusterSpec, calibration: Path | None) -> tuple[Machine, str]:
    """Return the cluster with its costs, and their source."""
    measured = _measured_device(spec, calibration)
    if measured is not None:
        return machine_of(spec, measured[0]), measured[1]
    name = known_gpu(spec.gpu).names[0]
    return machine_of(spec), f"data sheet figures of {name} and the shares of them that an H200 achieves"


def _cluster_job(
    config: Config,
    task: Task,
    facts: ModelFacts,
    spec: ClusterSpec,
    machine: Machine,
    recompute: bool,
    data: TrainingData | None = None,
) -> ScalingJob:
    from orchestrator.measure.tracing.step_trace import experts_of

    gpu = known_gpu(spec.gpu)
    precision = _precision(config, gpu.capability)
    grouped = precision in BF16_PRECISIONS and gpu.capability >= (9, 0)
    facts = with_memory_settings(config, facts)
    alone = with_weight_copies(config, facts, 1, _DEVICE, precision)
    tracer = make_tracer(task, alone, True, precision, grouped, recompute, data)
    batch = config.batch.batch_size
    if isinstance(batch, int):
        batch = facts.at_most(batch)
    else:
        most = facts.at_most(_MAX_DEFAULT_BATCH)
        batch = _largest_fitting_batch(tracer, machine.device, most, config.batch.gpu_memory_fraction)
    global_batch = facts.at_most(config.batch.global_batch_size or _strong_batch(batch, facts))
    units = getattr(task, "units_per_sample", 1)
    tf32 = gpu.capability >= (8, 0) and config.device.tf32 != "off"
    return ScalingJob(tracer, batch, global_batch, experts_of(task), units, tf32, facts.samples)


def _strong_batch(micro_batch: int, facts: ModelFacts) -> int:
    """Return a global batch that the data can fill, and that many numbers of devices divide evenly."""
    most = facts.at_most(micro_batch * _STRONG_MICRO_BATCHES) // micro_batch
    return micro_batch * _power_of_two(most)


def _measured_device(spec: ClusterSpec, path: Path | None) -> tuple[DeviceCosts, str] | None:
    """Return the GPU's measured figures and their source, if the calibration is of that GPU."""
    calibration = find_calibration(path)
    if calibration is None or short_name(calibration.machine) != spec.gpu:
        return None
    source = f"the calibration of {calibration.machine} of {calibration.made[:10]}"
    return calibration.profile(1).device, source


def _precision(config: Config, capability: tuple[int, int]) -> PrecisionName:
    if config.device.precision != "auto":
        return config.device.precision
    return "bf16" if capability >= (8, 0) else "fp16"


def _largest_fitting_batch(tracer: Tracer, device: DeviceCosts, most: int, memory_fraction: float) -> int:
    """Return the largest power of two, up to ``most``, whose step fits into the memory."""
    batch = _power_of_two(most)
    limit = memory_fraction * device.memory_bytes
    while batch > 1 and predicted_memory(tracer(batch, 1, 1, False), device, Parallelism()).total > limit:
        batch //= 2
    return batch


def _power_of_two(most: int) -> int:
    """Return the largest power of two up to ``most``, which is 1 or more."""
    return 1 << (most.bit_length() - 1)


# --- the table


def _scaling_table(title: str, rows: list[ScalingRow], spec: ClusterSpec) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        border_style="dim",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in COLUMNS:
        justify = "left" if column in _LEFT_ALIGNED else "right"
        table.add_column(column, no_wrap=column != "made of", justify=justify)
    for row in rows:
        style = "" if row.predicted.memory.fits else "red"
        table.add_row(*scaling_cells(row, spec), style=style)
    return table


def scaling_cells(row: ScalingRow, spec: ClusterSpec) -> list[str]:
    """Return a row of the table."""
    prediction = row.predicted
    memory = prediction.memory
    accumulation = f"×{row.micro_batches}" if row.micro_batches > 1 else ""
    excess = "" if memory.fits else f" > {bytes_text(memory.limit or 0)} of a {spec.gpu.upper()}"
    return [
        f"{row.devices:,}",
        f"{row.micro_batch}{accumulation}",
        seconds_text(prediction.step_seconds),
        speed_text(prediction.samples_per_second),
        f"{row.speed_up:,.2f}×",
        f"{row.efficiency:.0%}",
        bytes_text(memory.total) + excess,
        prediction.limited_by,
        prediction.parts_text(),
    ]
