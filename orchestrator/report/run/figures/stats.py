"""Figures of a run that text, page and verdict share, so that they never disagree. Pure functions
of a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from orchestrator.config.metric import Criterion, find_criterion
from orchestrator.errors import UserError
from orchestrator.record.events.decoding import finite
from orchestrator.record.events.kinds import Compile, Evaluation, Memory, Monitor, Start, Step
from orchestrator.record.summary.speed import Speed, after_warm_up
from orchestrator.report.run.figures.read import RunRecord, cached_on_record, entries, section
from orchestrator.types import MEMORY_PARTS, PHASES, counted

OTHER = "other"


@dataclass(frozen=True)
class MemoryUse:
    """Peaks in bytes, of the device on a GPU and of the process on a CPU."""

    allocated: float
    reserved: float | None
    limit: float | None
    estimate: float | None
    worker: int | None = None
    """The worker with the largest peak, whose parts were measured, where there are several."""

    @property
    def efficiency(self) -> float | None:
        return self.allocated / self.reserved if self.reserved else None


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one part of the memory: as the plan estimated it, and as it was measured."""

    name: str
    estimated: float | None
    measured: float | None


@dataclass(frozen=True)
class MonitoredFigure:
    """Mean and peak of a figure that the monitor sampled."""

    name: str
    unit: str
    mean: float
    peak: float


def values(events: Iterable[object], name: str) -> list[float]:
    """Return the finite values of a field, in order."""
    return [value for event in events if (value := finite(getattr(event, name))) is not None]


@cached_on_record
def speed(record: RunRecord) -> Speed | None:
    return record.totals.speed.speed()


@cached_on_record
def phase_seconds(record: RunRecord) -> dict[str, float]:
    """Return the mean seconds per step of each phase and of the time between them; empty if unmeasured.

    They add up to the mean step after the warm-up.
    """
    measured = after_warm_up([event for event in record.phases if event.total])
    # The last event of a run may average over fewer steps than the others.
    weights = [event.steps or 1.0 for event in measured]
    num_steps = sum(weights)
    if not num_steps:
        return {}

    def mean(name: str) -> float:
        seconds = [getattr(event, name) or 0.0 for event in measured]
        return sum(value * weight for value, weight in zip(seconds, weights, strict=True)) / num_steps

    return _with_rest({name: mean(name) for name in PHASES}, mean("total"))


@cached_on_record
def wall_seconds(record: RunRecord) -> dict[str, float]:
    """Return the run's time by purpose: training, evaluation, checkpoints, recoveries, the rest.

    Replayed steps count as training.
    """
    if not record.seconds or not record.steps:
        return {}
    parts = {
        "training": record.totals.recorded_step_seconds,
        "evaluation": record.totals.evaluation_seconds,
        "checkpoints": record.totals.stall_seconds,
        "recovery": sum(values(record.recoveries, "total_seconds")),
    }
    return _with_rest(parts, record.seconds)


def _with_rest(parts: dict[str, float], total: float) -> dict[str, float]:
    """Return the parts that took any time, and the rest of the total."""
    parts = parts | {OTHER: total - sum(parts.values())}
    return {name: part for name, part in parts.items() if part > 0}


def shares(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items()} if total else {}


@cached_on_record
def memory(record: RunRecord) -> MemoryUse | None:
    """Return the measured peak, with the plan's estimate and limit."""
    peak = _measured_peak(record)
    allocated = peak.allocated if peak else finite(record.summary.get("peak_memory_bytes"))
    if not allocated:
        return None
    planned = section(record.plan, "memory")
    # On a CPU the peak is the resident memory of the process, and nothing is reserved.
    reserved = peak.reserved if peak and record.on_gpu else None
    limit = finite(planned.get("limit"))
    estimate = finite(planned.get("total"))
    return MemoryUse(allocated, reserved or None, limit, estimate, peak.worker if peak else None)


@cached_on_record
def _measured_peak(record: RunRecord) -> Memory | None:
    return record.totals.peak.peak()


@cached_on_record
def memory_parts(record: RunRecord) -> list[MemoryPart]:
    """Return the parts of the memory that were estimated or measured, in the order of ``MEMORY_PARTS``."""
    planned = section(record.plan, "memory")
    peak = _measured_peak(record)
    measured = peak.parts if peak else {}
    parts = [MemoryPart(name, finite(planned.get(name)), measured.get(name)) for name in MEMORY_PARTS]
    return [part for part in parts if part.estimated or part.measured]


def monitored_figures(record: RunRecord) -> list[MonitoredFigure]:
    """Return mean and peak of every monitored figure: the host's first, then each device's."""
    samples: dict[tuple[str, str], list[float]] = {}
    for event in record.monitors:
        for name, unit, value in _monitored_values(event):
            samples.setdefault((name, unit), []).append(value)
    return [
        MonitoredFigure(name, unit, fmean(series), max(series)) for (name, unit), series in samples.items()
    ]


def _monitored_values(reading: Monitor) -> list[tuple[str, str, float]]:
    """Return name, unit and value of each figure of a monitor event."""
    host = reading.host
    figures = [
        ("host cpu", "%", host.cpu_percent),
        ("host memory", "B", host.memory_used),
        ("process memory", "B", host.process_memory),
    ]
    for device in reading.devices:
        gpu = f"gpu {device.index}"
        figures += [
            (f"{gpu} utilization", "%", device.utilization),
            (f"{gpu} memory", "B", device.memory_used),
            (f"{gpu} temperature", "°C", device.temperature),
            (f"{gpu} power", "W", device.power),
        ]
    return [(name, unit, value) for name, unit, value in figures if value is not None]


@cached_on_record
def gpu_utilization(record: RunRecord) -> float | None:
    """Return the mean utilization in percent over all samples of all devices."""
    samples = [use for reading in record.monitors for use in values(reading.devices, "utilization")]
    return fmean(samples) if samples else None


@cached_on_record
def watched_metric(record: RunRecord) -> str:
    """Return the validation metric that decides which checkpoint is best; the loss if no
    evaluation has it."""
    return watched_criterion(record).name


def watched_criterion(record: RunRecord) -> Criterion:
    """Return the watched metric and its direction."""
    by_loss = Criterion("loss", "min")
    try:
        criterion = find_criterion(str(record.start.best_by or by_loss), {}, "best_by")
    except (ValueError, UserError):
        return by_loss
    has_values = any(score_number(event, criterion.name) is not None for event in record.evaluations)
    return criterion if has_values else by_loss


def score(event: Step | Evaluation, name: str) -> float | None:
    """Return a metric of a step or an evaluation; the loss counts as one."""
    return event.loss if name == "loss" else event.metrics.get(name)


def score_number(event: Step | Evaluation, name: str) -> float | None:
    """Return a metric as a number to compare."""
    return finite(score(event, name))


def metric_names(record: RunRecord) -> list[str]:
    """Return every metric except the loss, accuracy first, then in order of appearance."""
    # Looking at every step would take long, and a task writes the same metrics in all of them.
    sampled = (*record.evaluations, *record.steps[:1], *record.steps[-1:])
    names = dict.fromkeys(name for event in sampled for name in event.metrics)
    return sorted(names, key=lambda name: "accuracy" not in name)


@cached_on_record
def best_evaluation(record: RunRecord) -> Evaluation | None:
    """Return the evaluation with the best watched metric; of equal ones that with the smallest loss."""
    criterion = watched_criterion(record)

    def order(event: Evaluation) -> tuple[float, float]:
        return criterion.order(score_number(event, criterion.name) or 0.0, score_number(event, "loss"))

    known = [event for event in record.evaluations if score_number(event, criterion.name) is not None]
    return max(known, key=order, default=None)


def final_evaluation(record: RunRecord) -> Evaluation | None:
    """Return the evaluation of the final weights; the last one if the run has not ended."""
    step = record.final.step if record.final is not None else None
    of_final = [event for event in record.evaluations if event.step == step]
    return next(iter([*of_final, *record.evaluations[-1:]]), None)


def flops_per_second(record: RunRecord) -> float | None:
    """Return the plan's count of operations over the median step."""
    measured = speed(record)
    flops = finite(record.plan.get("flops_per_step"))
    return flops / measured.median_step_s if measured and flops else None


def is_compiled(record: RunRecord) -> bool:
    """Return whether the run was compiled; a compilation without any event succeeded."""
    compiles = record.of(Compile)
    if compiles:
        return compiles[-1].status == "compiled"
    choice = section(section(record.plan, "choices"), "compile")
    return choice.get("value") is True or record.setting("device", "compile") in (True, "on")


def device_name(record: RunRecord) -> str:
    """Return the device's product name and its name in torch: 'NVIDIA H200 · cuda:0'."""
    hardware = section(record.plan, "hardware")
    device = record.fact("device")
    gpus = {f"cuda:{gpu.get('index')}": gpu.get("name") for gpu in entries(hardware, "gpus")}
    product = gpus.get(str(device)) if record.on_gpu else hardware.get("cpu_name")
    names = (hardware.get("device") or product, device)
    return " · ".join(dict.fromkeys(str(name) for name in names if name))


def workers_text(record: RunRecord) -> str:
    """Return the number of workers and how they are connected: '2, gloo, on 1 node'; empty if unknown."""
    count = record.workers
    if count is None:
        return ""
    start = record.start
    first = next((event.workers for event in record.of(Start)), None)
    parts = [f"{count} ({first} at first)" if first not in (None, count) else str(count)]
    if start.backend:
        parts.append(start.backend)
    if start.sharding not in (None, "none"):
        parts.append(f"sharding {start.sharding}")
    if start.nodes is not None:
        parts.append(f"on {counted(start.nodes, 'node')}")
    if len(set(start.shares)) > 1:
        parts.append("shares " + " / ".join(f"{share:.0%}" for share in start.shares))
    return ", ".join(parts)


def unit_name(record: RunRecord) -> str:
    """Return the name of a unit that is not a sample."""
    return str(record.fact("unit") or "tokens")


@cached_on_record
def non_finite_text(record: RunRecord) -> str | None:
    """Return the steps whose loss was nan or infinite, in words; None if there were none."""
    totals = record.totals
    if not totals.num_non_finite:
        return None
    steps = counted(totals.num_non_finite, "step")
    return f"the loss of {steps}, first at step {totals.first_non_finite}"
