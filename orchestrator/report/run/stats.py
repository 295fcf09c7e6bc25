"""The figures of a run that text, page and verdict share, so that they never disagree. Pure functions over a record."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from orchestrator.record.events import Event
from orchestrator.report.run.read import RunRecord, entries, finite, number, remembered, section
from orchestrator.types import count_text

PHASES = ("data", "forward", "backward", "communication", "optimizer")
OTHER = "other"


@dataclass(frozen=True)
class Throughput:
    """Per second of training steps. ``units`` (tokens) is None where a unit is a sample."""

    samples: float
    units: float | None
    step_s: float
    """The median step: unlike the mean it knows nothing of compilation and other first-step costs."""


@dataclass(frozen=True)
class MemoryUse:
    """Peaks in bytes, of the device on a GPU and of the process on a CPU."""

    allocated: float
    reserved: float | None
    limit: float | None
    estimate: float | None

    @property
    def efficiency(self) -> float | None:
        return self.allocated / self.reserved if self.reserved else None


@dataclass(frozen=True)
class Use:
    """A monitored figure over the run."""

    name: str
    unit: str
    mean: float
    peak: float


def values(events: Iterable[Event], name: str) -> list[float]:
    """The finite values of a field, in order."""
    return [value for event in events if (value := finite(event.get(name))) is not None]


@remembered
def throughput(record: RunRecord) -> Throughput | None:
    timed = [event for event in record.steps if (finite(event.get("seconds")) or 0) > 0]
    seconds = sum(values(timed, "seconds"))
    if not seconds:
        return None
    samples, units = sum(values(timed, "samples")), sum(values(timed, "units"))
    told = finite(record.summary.get("samples_per_second"))
    return Throughput(
        samples=told if told is not None else samples / seconds,
        units=units / seconds if units and units != samples else None,
        step_s=median(values(timed, "seconds")),
    )


@remembered
def phase_seconds(record: RunRecord) -> dict[str, float]:
    """Mean seconds per step of each phase and of what lies between them; empty when none were measured."""
    weights = [
        (event, finite(event.get("steps")) or 1.0) for event in record.phases if finite(event.get("total"))
    ]
    count = sum(weight for _, weight in weights)
    if not count:
        return {}
    mean = {
        name: sum((finite(event.get(name)) or 0.0) * weight for event, weight in weights) / count
        for name in (*PHASES, "total")
    }
    return _with_rest({name: mean[name] for name in PHASES}, mean["total"])


@remembered
def wall_seconds(record: RunRecord) -> dict[str, float]:
    """Where the run's time went: training, evaluation, checkpoints, recoveries and the rest. Replayed steps took their time too."""
    if not record.seconds or not record.steps:
        return {}
    parts = {
        name: sum(values(record.of(kind), "seconds"))
        for name, kind in (("training", "step"), ("evaluation", "evaluate"))
    }
    parts["checkpoints"] = sum(stalls(record))
    parts["recovery"] = sum(values(record.recoveries, "total_seconds"))
    return _with_rest(parts, record.seconds)


def stalls(record: RunRecord) -> list[float]:
    """Seconds that each checkpoint held up the training: all of its time, unless it was written in the background."""
    held = [finite(event.get("stall", event.get("seconds"))) for event in record.of("checkpoint")]
    return [seconds for seconds in held if seconds is not None]


def _with_rest(parts: dict[str, float], whole: float) -> dict[str, float]:
    """The parts that took any time, and what they leave of the whole."""
    parts = parts | {OTHER: whole - sum(parts.values())}
    return {name: part for name, part in parts.items() if part > 0}


def shares(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items()} if total else {}


@remembered
def memory(record: RunRecord) -> MemoryUse | None:
    """The peak that was measured, beside the plan's estimate and limit."""
    measured = [section(event, "memory") for event in record.epochs]
    allocated = max(values(measured, "allocated"), default=None) or finite(
        record.summary.get("peak_memory_bytes")
    )
    if not allocated:
        return None
    planned = section(record.plan, "memory")
    # On a CPU the peak is the process's resident memory: there is no reserve.
    reserved = max(values(measured, "reserved"), default=None) if record.on_gpu else None
    return MemoryUse(allocated, reserved or None, finite(planned.get("limit")), finite(planned.get("total")))


def device_use(record: RunRecord) -> list[Use]:
    """Mean and peak of what the monitor saw: host first, then each device."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in record.monitors:
        for name, unit, value in _sample(event):
            found.setdefault((name, unit), []).append(value)
    return [Use(name, unit, fmean(series), max(series)) for (name, unit), series in found.items()]


def _sample(event: Event) -> Iterable[tuple[str, str, float]]:
    host = section(event, "host")
    named = [
        ("host cpu", "%", finite(host.get("cpu_percent"))),
        ("host memory", "B", finite(host.get("memory_used"))),
    ]
    named.append(("process memory", "B", finite(host.get("process_memory"))))
    for device in entries(event, "devices"):
        label = f"gpu {device.get('index', 0)}"
        for name, unit in (("utilization", "%"), ("memory_used", "B"), ("temperature", "°C"), ("power", "W")):
            named.append((f"{label} {name.removesuffix('_used')}", unit, finite(device.get(name))))
    return [(name, unit, value) for name, unit, value in named if value is not None]


@remembered
def gpu_utilization(record: RunRecord) -> float | None:
    """Mean utilization in percent over all samples of all devices."""
    seen = [use for event in record.monitors for use in values(entries(event, "devices"), "utilization")]
    return fmean(seen) if seen else None


@remembered
def watched_metric(record: RunRecord) -> str:
    """The validation metric that decides what is best, where evaluations carry it."""
    asked = str(section(record.config, "run").get("early_stopping_metric") or "loss")
    return asked if any(metric(event, asked) is not None for event in record.evaluations) else "loss"


def score(event: Event, name: str) -> Any:
    """A metric of a step or an evaluation as it was written; the loss counts as one."""
    return event.get("loss") if name == "loss" else section(event, "metrics").get(name)


def metric(event: Event, name: str) -> float | None:
    """The score as a number to compare."""
    return finite(score(event, name))


def metric_names(record: RunRecord) -> list[str]:
    """Every metric but the loss, accuracy first, then in order of appearance."""
    seen = {
        str(name): None
        for event in (*record.evaluations, *record.steps[:1], *record.steps[-1:])
        for name in section(event, "metrics")
    }
    return sorted(seen, key=lambda name: "accuracy" not in name)


@remembered
def best_evaluation(record: RunRecord) -> Event | None:
    """The evaluation with the best watched metric: the smallest loss, the largest of anything else."""
    name = watched_metric(record)
    known = [event for event in record.evaluations if metric(event, name) is not None]
    return (min if name == "loss" else max)(known, key=lambda event: metric(event, name) or 0.0, default=None)


def flops_per_second(record: RunRecord) -> float | None:
    """The plan's count of operations over the median step."""
    rate, work = throughput(record), finite(record.plan.get("flops_per_step"))
    return work / rate.step_s if rate and work else None


def compiled(record: RunRecord) -> bool:
    """Whether compilation was asked for and held. No event is needed for one that simply worked."""
    told = [str(event.get("status", "")).lower() for event in record.of("compile")]
    if told:
        return not any(word in told[-1] for word in ("fail", "fell", "fall", "off", "error", "not"))
    choice = section(section(record.plan, "choices"), "compile")
    return choice.get("value") is True or record.setting("device", "compile") in (True, "on")


def device_name(record: RunRecord) -> str:
    """The device by the name its maker gave it, and as torch calls it: 'NVIDIA H200 · cuda:0'."""
    hardware, device = section(record.plan, "hardware"), record.fact("device")
    gpus = {f"cuda:{gpu.get('index')}": gpu.get("name") for gpu in entries(hardware, "gpus")}
    maker = hardware.get("device") or (gpus.get(str(device)) if record.on_gpu else hardware.get("cpu_name"))
    return " · ".join(dict.fromkeys(str(part) for part in (maker, device) if part))


def workers_text(record: RunRecord) -> str:
    """How many worked on the run, and how they were joined: '2, gloo, on 1 node'. Empty where it is not told."""
    count, start = record.workers, record.start
    if count is None:
        return ""
    first = next((event.get("workers") for event in record.of("start")), None)
    parts = [f"{count} ({first} at first)" if isinstance(first, int) and first != count else str(count)]
    parts += [str(start["backend"])] if start.get("backend") else []
    parts += [f"sharding {start['sharding']}"] if start.get("sharding") not in (None, "none") else []
    nodes, parts_of_batch = start.get("nodes"), start.get("shares")
    parts += [f"on {plural(nodes, 'node', 'nodes')}"] if isinstance(nodes, int) else []
    if isinstance(parts_of_batch, list) and len(set(map(str, parts_of_batch))) > 1:
        parts.append(
            "shares "
            + " / ".join(f"{share:.0%}" for value in parts_of_batch if (share := finite(value)) is not None)
        )
    return ", ".join(parts)


def unit_name(record: RunRecord) -> str:
    """What a unit is where it is not a sample."""
    return str(record.fact("unit") or "tokens")


def flops_text(rate: float) -> str:
    """4.85e14 -> '485.3 TFLOP/s'."""
    text = count_text(rate)
    return f"{text[:-1]} {text[-1]}FLOP/s" if text[-1].isalpha() else f"{text} FLOP/s"


@remembered
def not_finite(record: RunRecord) -> str | None:
    """Which training losses were no number, in words; None when all were."""
    bad = [
        event["step"]
        for event in record.steps
        if (loss := number(event.get("loss"))) is not None and not math.isfinite(loss)
    ]
    return f"the loss of {plural(len(bad), 'step', 'steps')}, first at step {bad[0]}" if bad else None


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
