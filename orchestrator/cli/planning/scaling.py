"""``plan --cluster``: the predicted scaling table of a cluster, which need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from orchestrator.cli.planning.prediction import DeviceFigures, shortage_of, tracer_of
from orchestrator.config.reading.reader import Resolved
from orchestrator.plan.compute import with_memory_settings, with_weight_copies
from orchestrator.plan.cost.cluster_spec import CORES_PER_GPU, RAM_PER_GPU_MEMORY, ClusterSpec, nodes_of
from orchestrator.plan.cost.devices import known_gpu
from orchestrator.plan.cost.machine import DeviceCosts, Machine
from orchestrator.plan.cost.model import HOST_OVERHEAD
from orchestrator.plan.cost.scaling import (
    IMBALANCE,
    ScalingJob,
    ScalingRow,
    by_kind,
    scaling_rows,
)
from orchestrator.plan.estimate import ModelFacts, estimate_memory
from orchestrator.types import bytes_text, counted, seconds_text, speed_text

if TYPE_CHECKING:
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.run.prepared_run import PreparedRun

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


ASSUMED_NODE = (
    f"each node is taken to have {CORES_PER_GPU} cores for each GPU, and RAM of {RAM_PER_GPU_MEMORY} times "
    "the memory of its GPUs"
)


@dataclass(frozen=True)
class Scaling:
    """The predicted scaling of a run on a cluster."""

    spec: ClusterSpec
    rows: list[ScalingRow]
    notes: list[str]
    """What the tables assume, why they end where they do, and which flags they do not use."""
    source: str
    """Where the figures of the devices are from."""
    shortage: str | None
    """With the nearest configuration that fits; None if a micro-batch fits into the memory of each GPU."""

    def to_json(self) -> dict[str, Any]:
        return {
            "shortage": self.shortage,
            "cluster": self.spec.text(),
            "network": _network_text(self.spec),
            "source": self.source,
            "notes": self.notes,
            "rows": [row.to_json() for row in self.rows],
        }

    @property
    def headline(self) -> str:
        return f"cluster: {self.spec.text()}; {_network_text(self.spec)}"

    @property
    def tables(self) -> Iterator[Table]:
        for (kind, strategy), group in by_kind(self.rows).items():
            title = f"{self.spec.text()}; {strategy.replace('_', ' ')}, {_TITLES[kind]}"
            yield _scaling_table(title, group, self.spec)


def predict_scaling(
    prepared: PreparedRun, spec: ClusterSpec, figures: DeviceFigures, data: TrainingData | None = None
) -> Scaling:
    """Predict the scaling of a run on each number of a cluster's devices."""
    job = _scaling_job(prepared, spec, figures.machine, data)
    rows = scaling_rows(job, figures.machine)
    notes = [*_assumptions(prepared.resolved, spec, job), ASSUMED_NODE]
    if any(row.predicted.limited_by == HOST_OVERHEAD for row in rows):
        notes.append(
            f"{HOST_OVERHEAD} is the time in which a host launches operations more slowly than its device "
            "computes them; where it is the limit, a faster device would gain little"
        )
    return Scaling(spec, rows, notes, figures.source, shortage_of(prepared, data))


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


def _scaling_job(
    prepared: PreparedRun, spec: ClusterSpec, machine: Machine, data: TrainingData | None
) -> ScalingJob:
    from orchestrator.measure.tracing.step_trace import experts_of

    config = prepared.resolved.config
    plan = prepared.plan
    facts = with_memory_settings(config, prepared.facts)
    alone = with_weight_copies(config, facts, 1, plan.device.value, plan.precision.value)
    recompute = plan.activation_checkpointing.value
    batch = config.batch.batch_size
    if isinstance(batch, int):
        batch = facts.at_most(batch)
    else:
        most = facts.at_most(_MAX_DEFAULT_BATCH)
        batch = _largest_fitting_batch(
            alone, recompute, machine.device, most, config.batch.gpu_memory_fraction
        )
    return ScalingJob(
        tracer_of(prepared, alone, data),
        batch,
        facts.at_most(config.batch.global_batch_size or _strong_batch(batch, facts)),
        experts_of(prepared.task),
        getattr(prepared.task, "units_per_sample", 1),
        known_gpu(spec.gpu).capability >= (8, 0) and config.device.tf32 != "off",
        facts,
        alone.copied_experts,
        recompute,
        facts.samples,
    )


def _strong_batch(micro_batch: int, facts: ModelFacts) -> int:
    """Return a global batch that the data can fill, and that many numbers of devices divide evenly."""
    most = facts.at_most(micro_batch * _STRONG_MICRO_BATCHES) // micro_batch
    return micro_batch * _power_of_two(most)


def _largest_fitting_batch(
    facts: ModelFacts, recompute: bool, device: DeviceCosts, most: int, memory_fraction: float
) -> int:
    """Return the largest power of two, up to ``most``, whose step fits into the memory."""
    batch = _power_of_two(most)
    limit = memory_fraction * device.memory_bytes
    while batch > 1 and not estimate_memory(facts, batch, recompute, limit, single_pass=True).fits:
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
        style = "" if row.memory.fits else "red"
        table.add_row(*scaling_cells(row, spec), style=style)
    return table


def scaling_cells(row: ScalingRow, spec: ClusterSpec) -> list[str]:
    """Return a row of the table."""
    prediction = row.predicted
    memory = row.memory
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
