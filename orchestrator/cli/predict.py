"""What a step will take, on the screen: the calibration of this machine, the line that ``plan`` shows with it, and the scaling table
of a cluster that one does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.config.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import OrchestratorError
from orchestrator.plan.cost.calibration import (
    AGAIN,
    FILE,
    Calibration,
    Profile,
    read_calibration,
    write_calibration,
)
from orchestrator.plan.cost.devices import known_gpu, short_name
from orchestrator.plan.cost.model import (
    DeviceCosts,
    Machine,
    Parallelism,
    StepPrediction,
    predict,
    predicted_memory,
)
from orchestrator.plan.cost.scaling import (
    IMBALANCE,
    ClusterSpec,
    ScalingJob,
    ScalingRow,
    by_kind,
    given_keys,
    machine_of,
    parse_cluster,
    scaling_rows,
)
from orchestrator.plan.inventory.hardware import Inventory, inventory, results_folder
from orchestrator.types import PrecisionName, bytes_text, seconds_text

if TYPE_CHECKING:
    from orchestrator.plan.cost.ops import MicroBatchOps
    from orchestrator.tasks.task import Task
    from orchestrator.train.worker.run_dir import Prepared

_MOST_OTHERS = 0.05  # of the processors, used by others while it was measured
_LARGEST_BATCH = 64  # samples, where none was asked for
_STRONG = 64  # micro-batches of the global batch, where none was asked for
_WIDE = 150  # columns, where the table goes into a file
COLUMNS = (
    "devices",
    "batch",
    "step",
    "samples/s",
    "speed-up",
    "efficiency",
    "memory",
    "limited by",
    "made of",
)
_TITLES = {
    "weak": "weak scaling: as many samples on each device",
    "strong": "strong scaling: one global batch for all",
}


def calibrate_machine(path: Path | None, as_json: bool) -> int:
    """Measure this machine for the cost model, and keep the figures in a file."""
    from orchestrator.measure.calibrate import CalibrationScope, calibrate

    target, found, console = path or results_folder() / FILE, inventory(), Console(stderr=True)
    with console.status("calibrating …") as status:
        made = calibrate(found, CalibrationScope.of(found), lambda part: status.update(f"calibrating: {part} …"))
    write_calibration(made, target)
    if as_json:
        Console().print_json(target.read_text(encoding="utf-8"))
        return 0
    Console().print(_calibration_table(made))
    if made.others > _MOST_OTHERS:
        Console().print(
            Text(
                f"others used {made.others:.0%} of the processors meanwhile: the figures may be too slow; repeat it when it is quiet"
            )
        )
    Console().print(
        Text(
            f"measured in {made.seconds:.0f} s, kept in {target}; 'orchestrator plan' now predicts the step time"
        ),
        soft_wrap=True,
    )
    return 0


def _calibration_table(made: Calibration) -> Table:
    table = Table(
        title=f"calibration of {made.machine}", title_justify="left", header_style="bold", border_style="dim"
    )
    names = [
        f"{entry.workers} worker{'s' * (entry.workers > 1)}, {entry.threads} thread{'s' * (entry.threads > 1)}"
        for entry in made.profiles
    ]
    for column in ("figure", *names):
        table.add_column(column)
    rows = [_figures(entry.device) | _explained(entry) for entry in made.profiles]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    for name in ("sums", "exchange"):
        links = [getattr(entry.links, name, None) for entry in made.profiles]
        if any(links):
            table.add_row(f"link, {name}", *(_link_text(link) for link in links))
    return table


def _figures(device: DeviceCosts) -> dict[str, str]:
    figures = {}
    for precision, grids in device.products.items():
        grid = grids["nn"]
        m, k, n = grid.m[-1], grid.k[-1], grid.n[-1]
        figures[f"products in {precision}, large"] = f"{2 * m * k * n / grid.at(m, k, n) / 1e9:,.0f} GFLOP/s"
        figures[f"products in {precision}, small"] = (
            f"{2 * grid.m[1] * grid.k[1] * grid.n[1] / grid.at(grid.m[1], grid.k[1], grid.n[1]) / 1e9:,.1f} GFLOP/s"
        )
    plain = device.moves["plain"]
    figures["memory"] = (
        f"{max(size / value for size, value in zip(plain.sizes, plain.values, strict=True)) / 1e9:,.0f} GB/s"
    )
    figures["optimizer"] = (
        f"{device.optimizer.sizes[-1] / device.optimizer.values[-1] / 1e9:,.1f} GB/s of parameters"
    )
    host = {
        "operation": device.operation_s,
        "kernel from Python": device.launch_s,
        "view": device.view_s,
        "parameter": device.tensor_s,
    }
    return figures | {
        f"overhead per {name}": seconds_text(value)
        for name, value in (host | {"step": device.step_s}).items()
    }


def _explained(entry: Profile) -> dict[str, str]:
    """How well the overheads explain the steps that they were found from."""
    errors = [
        abs(reference.fitted_s / reference.measured_s - 1)
        for reference in entry.references
        if reference.measured_s > 0
    ]
    return {"reference steps": f"explained to {max(errors):.0%}" if errors else ""}


def _link_text(link: Any) -> str:
    return (
        ""
        if link is None
        else f"{link.kind}: {seconds_text(link.latency_s)}, {link.bytes_per_s / 1e9:.2f} GB/s"
    )


def found_calibration(asked: Path | None) -> Calibration | None:
    """The one that was asked for, or that of the results folder where there is one."""
    usual = results_folder() / FILE
    if asked is None and not usual.is_file():
        return None
    return read_calibration(asked or usual)


def step_prediction(prepared: Prepared, asked: Path | None) -> tuple[str, dict[str, Any] | None]:
    """A line about the predicted step of a plan, and the same for machines."""
    chosen, found = prepared.plan, prepared.inventory
    on_gpu, workers = chosen.device.value != "cpu", chosen.workers.value
    made = found_calibration(asked)
    described = _described(made, found, on_gpu, workers)
    if described is None:
        return f"step time: not predicted; {AGAIN.replace('measure again', 'measure this machine')}", None
    machine, crowding, source = described
    hosts = workers if chosen.strategy.value == "expert_parallel" else 1
    try:
        work = _tracer(
            prepared.task,
            on_gpu,
            chosen.precision.value,
            _fused(found, on_gpu, chosen.precision.value),
            chosen.activation_checkpointing.value,
        )(chosen.batch_size.value, hosts, chosen.exchange_chunks.value)
    except OrchestratorError:
        raise
    except Exception as error:  # a model that cannot be traced without data has a plan, but no prediction
        return f"step time: not predicted, the model cannot be traced ({type(error).__name__})", None
    team = Parallelism(
        workers,
        chosen.strategy.value,
        chosen.accumulation_steps.value,
        1.0,
        chosen.exchange_chunks.value,
        chosen.tf32.value,
        crowding,
    )
    predicted = predict(work, machine, team)
    compiled = "; compiled, it may be faster" if chosen.compile.value else ""
    return f"step time: {_sentence(predicted)} (predicted from {source}{compiled})", predicted.to_json() | {
        "source": source
    }


def _described(
    made: Calibration | None, found: Inventory, on_gpu: bool, workers: int
) -> tuple[Machine, float, str] | None:
    """The machine at hand as it was measured, or as its GPU is known."""
    here = found.gpus[0].name if on_gpu else f"{found.cpu_name}, {found.cores} cores"
    if made is not None and made.machine == here:
        machine, crowding = made.machine_for(workers)
        return machine, crowding, f"the calibration of {made.made[:10]}"
    short = short_name(here) if on_gpu else None
    if short is None:
        return None
    known = known_gpu(short)
    spec = ClusterSpec(1, max(1, workers), short, "nvlink" if known.nvlink_gb_s else "pcie", 100.0, 1)
    return machine_of(spec), 1.0, f"known figures of {known.names[0]}"


def _fused(found: Inventory, on_gpu: bool, precision: str) -> bool:
    """Whether experts of a size are computed in one operation."""
    return not on_gpu or (precision == "bf16" and min(gpu.capability for gpu in found.gpus) >= (9, 0))


def _sentence(predicted: StepPrediction) -> str:
    whole = predicted.step_seconds
    parts = ", ".join(
        f"{name} {value / whole:.0%}" for name, value in predicted.parts.items() if abs(value) >= 0.01 * whole
    )
    return f"{seconds_text(whole)}, {predicted.samples_per_second:,.0f} samples/s: {parts}; limited by {predicted.limited_by}"


def _tracer(task: Task, on_gpu: bool, precision: PrecisionName, grouped: bool, recompute: bool = False) -> Any:
    """Work by samples, hosts and parts; each traced once."""
    from orchestrator.measure.step_trace import TraceOptions, trace_step

    @cache
    def work(samples: int, hosts: int, chunks: int) -> MicroBatchOps:
        return trace_step(task, samples, TraceOptions(on_gpu, precision, grouped, hosts, chunks, recompute))

    return work


def show_cluster(resolved: Resolved, text: str, calibration: Path | None, as_json: bool) -> int:
    """The predicted scaling table of a cluster."""
    spec = parse_cluster(text)
    with Console(stderr=True).status("tracing the model …"):
        job, machine, source = _cluster_job(resolved.config, spec, calibration)
        rows = scaling_rows(job, machine)
    notes = [f"predicted from {source}", *_assumed(resolved, given_keys(text), spec, job)]
    if as_json:
        told = {
            "cluster": spec.text(),
            "source": source,
            "notes": notes[1:],
            "rows": [row.to_json() for row in rows],
        }
        Console().print_json(json.dumps(told))
        return 0
    console = Console() if Console().is_terminal else Console(width=_WIDE)
    for (kind, strategy), group in by_kind(rows).items():
        console.print(
            _scaling_table(f"{spec.text()}; {strategy.replace('_', ' ')}, {_TITLES[kind]}", group, spec)
        )
    console.print(Text("\n".join(notes)), soft_wrap=True)
    return 0


def _assumed(resolved: Resolved, given: Mapping[str, str], spec: ClusterSpec, job: ScalingJob) -> list[str]:
    """What the tables take for granted, why they end where they do, and what of the call they do not look at."""
    notes: list[str] = []
    if job.experts and spec.devices > 1:
        notes.append(
            f"the busiest device's experts are taken to have {IMBALANCE - 1:.0%} more rows than the mean"
        )
    if 0 < job.experts < spec.devices:
        notes.append(
            f"expert parallel has at most {job.experts} devices: there are as many experts, and each device holds one at least"
        )
    if job.global_batch < spec.devices:
        notes.append(
            f"strong scaling has at most {job.global_batch} devices: its global batch has as many samples"
        )
    if "net" not in given and spec.nodes > 1:
        notes.append(
            f"a network of {spec.net_gbit:g} Gbit/s per node is assumed, none was given (net=400gbit)"
        )
    if resolved.origin("workers") != "default":
        notes.append(
            f"--workers {resolved.config.parallel.workers} is not used: there is a row for each number of devices"
        )
    return notes


def cluster_rows(config: Config, spec: ClusterSpec, calibration: Path | None = None) -> tuple[list[ScalingRow], str]:
    """The rows of the table, and where the figures of the device come from."""
    job, machine, source = _cluster_job(config, spec, calibration)
    return scaling_rows(job, machine), source


def _cluster_job(config: Config, spec: ClusterSpec, calibration: Path | None) -> tuple[ScalingJob, Machine, str]:
    from orchestrator.measure.step_trace import experts_of
    from orchestrator.tasks.load import load_task

    task, known = load_task(config), known_gpu(spec.gpu)
    precision = _precision(config, known.capability)
    recompute = config.device.activation_checkpointing == "on"
    work = _tracer(task, True, precision, precision == "bf16" and known.capability >= (9, 0), recompute)
    measured = _measured(spec, calibration)
    machine = machine_of(spec, measured[0] if measured else None)
    asked = config.batch.batch_size
    batch = (
        asked if isinstance(asked, int) else _fitting(work, machine.device, config.batch.gpu_memory_fraction)
    )
    whole = config.batch.global_batch_size or batch * _STRONG
    tf32 = known.capability >= (8, 0) and config.device.tf32 != "off"
    job = ScalingJob(work, batch, whole, experts_of(task), getattr(task, "units_per_sample", 1), tf32)
    source = (
        measured[1]
        if measured
        else f"data sheet figures of {known.names[0]} and the shares of them that an H200 achieves"
    )
    return job, machine, source


def _measured(spec: ClusterSpec, calibration: Path | None) -> tuple[DeviceCosts, str] | None:
    """The GPU's own figures, where the calibration at hand is of such a one."""
    made = found_calibration(calibration)
    if made is None or short_name(made.machine) != spec.gpu:
        return None
    return made.profile(1).device, f"the calibration of {made.machine} of {made.made[:10]}"


def _precision(config: Config, capability: tuple[int, int]) -> PrecisionName:
    asked = config.device.precision
    return asked if asked != "auto" else "bf16" if capability >= (8, 0) else "fp16"


def _fitting(work: Any, device: DeviceCosts, fraction: float) -> int:
    """Samples of a micro-batch, where none were asked for: the largest power of two, up to a limit, whose step fits."""
    batch = _LARGEST_BATCH
    while (
        batch > 1
        and predicted_memory(work(batch, 1, 1), device, Parallelism()).total > fraction * device.memory_bytes
    ):
        batch //= 2
    return batch


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
        table.add_column(
            column,
            no_wrap=column != "made of",
            justify="left" if column in ("made of", "limited by") else "right",
        )
    for row in rows:
        table.add_row(*scaling_cells(row, spec), style="" if row.predicted.memory.fits else "red")
    return table


def scaling_cells(row: ScalingRow, spec: ClusterSpec) -> list[str]:
    """A line of the table, for people: what the step is made of, the largest first."""
    found, whole = row.predicted, row.predicted.step_seconds
    parts = sorted(found.parts.items(), key=lambda part: -abs(part[1]))
    made_of = ", ".join(f"{name} {value / whole:.0%}" for name, value in parts if abs(value) >= 0.02 * whole)
    batch = f"{row.micro_batch}" + (f"×{row.micro_batches}" if row.micro_batches > 1 else "")
    numbers = [
        seconds_text(whole),
        f"{found.samples_per_second:,.0f}",
        f"{row.speed_up:,.2f}×",
        f"{row.efficiency:.0%}",
    ]
    fits = "" if found.memory.fits else f" > {bytes_text(found.memory.limit or 0)} of a {spec.gpu.upper()}"
    return [
        f"{row.devices:,}",
        batch,
        *numbers,
        bytes_text(found.memory.total) + fits,
        found.limited_by,
        made_of,
    ]
