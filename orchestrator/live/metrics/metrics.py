"""Metrics of a run: the figures of its state under the names that Prometheus stores.

Quantities are in base units (seconds, bytes, watts, ratios), and their names end with the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from orchestrator.record.events.kinds import DeviceSample, Evaluation, Event, Exchange, Monitor, Phases
from orchestrator.record.live.state import RunState
from orchestrator.types import PHASES

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]
Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Metric:
    """A metric: its name and meaning, and the function that reads its samples from a run's state."""

    short_name: str
    help: str
    read: Callable[[RunState], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"orchestrator_{self.short_name}"

    @property
    def kind(self) -> Kind:
        return "counter" if self.name.endswith("_total") else "gauge"


def _one(read: Callable[[RunState], float | None]) -> Callable[[RunState], Iterator[Sample]]:
    """Return a reader of a metric with one sample, or none where the value is unknown."""

    def samples(state: RunState) -> Iterator[Sample]:
        value = read(state)
        if value is not None:
            yield (), float(value)

    return samples


def _count(name: str) -> Callable[[RunState], Iterator[Sample]]:
    return _one(lambda state: state.counts[name])


def _field(event: type[Event], name: str) -> Callable[[RunState], Iterator[Sample]]:
    """Return a reader of a field of the newest event of a kind."""
    return _one(lambda state: getattr(state.newest(event), name, None))


def _last_step(name: str) -> Callable[[RunState], Iterator[Sample]]:
    return _one(lambda state: getattr(state.steps[-1], name) if state.steps else None)


def _speed(name: str) -> Callable[[RunState], Iterator[Sample]]:
    def read(state: RunState) -> float | None:
        speed = state.speed()
        return None if speed is None else getattr(speed, name)

    return _one(read)


def _info(state: RunState) -> Iterator[Sample]:
    if state.start is not None:
        yield tuple((name, str(getattr(state.start, name) or "")) for name in _INFO), 1.0


_INFO = ("version", "task", "strategy", "device", "precision")


def _phases(state: RunState) -> Iterator[Sample]:
    for phase in PHASES:
        seconds = getattr(state.newest(Phases), phase, None)
        if seconds is not None:
            yield (("phase", phase),), seconds


def _host_times(state: RunState) -> Iterator[Sample]:
    placement = state.experts.placement
    times = state.experts.host_times()
    if placement is not None and times is not None:
        for host, time in zip(placement.hosts, times, strict=True):
            yield (("host", str(host.rank)),), time


def _experts(state: RunState) -> Iterator[Sample]:
    for layer, use in enumerate(state.experts.layers()):
        yield (("layer", str(layer)),), float(len(use))


def _expert_peaks(state: RunState) -> Iterator[Sample]:
    for layer, use in enumerate(state.experts.layers()):
        if use:
            yield (("layer", str(layer)),), max(use.values())


def _expert_changes(state: RunState) -> Iterator[Sample]:
    for name, count in state.counts.items():
        kind = name.removeprefix("expert ")
        if kind != name:
            yield (("change", kind),), float(count)


def _node(name: str, scale: float = 1.0) -> Callable[[RunState], Iterator[Sample]]:
    """Return a reader of a figure of the main worker's node."""

    def read(state: RunState) -> float | None:
        reading = state.newest(Monitor)
        value = getattr(reading.host, name) if reading is not None else None
        return None if value is None else value * scale

    return _one(read)


def _gpus(name: str, scale: float = 1.0) -> Callable[[RunState], Iterator[Sample]]:
    """Return a reader of a figure of each GPU of the main worker's node."""

    def samples(state: RunState) -> Iterator[Sample]:
        reading = state.newest(Monitor)
        for device in reading.devices if reading is not None else ():
            value = getattr(device, name)
            if value is not None:
                yield _gpu_labels(device), value * scale

    return samples


def _gpu_labels(device: DeviceSample) -> Labels:
    return ("gpu", str(device.index)), ("name", device.name or "")


_GPU = ("gpu", "name")
_PERCENT = 0.01

METRICS = (
    Metric("run_info", "Constants of the run, in the labels; always 1.", _info, _INFO),
    Metric(
        "running",
        "1 while the run trains, 0 before it starts and after it ended.",
        _one(lambda state: state.status == "running"),
    ),
    Metric("step", "The last step that was trained.", _one(lambda state: state.step)),
    Metric("planned_steps", "Steps of the whole run.", _one(lambda state: state.total_steps)),
    Metric("epoch", "The epoch of the last step, from 1.", _one(lambda state: state.epoch)),
    Metric("workers", "Workers that train.", _one(lambda state: state.workers)),
    Metric(
        "remaining_seconds",
        "Time of the steps to come at the recent speed.",
        _one(lambda state: state.seconds_left()),
    ),
    Metric("loss", "Training loss of the last step.", _one(lambda state: state.loss)),
    Metric("validation_loss", "Loss of the last evaluation.", _field(Evaluation, "loss")),
    Metric("gradient_norm", "Gradient norm of the last step.", _last_step("grad_norm")),
    Metric("learning_rate", "Learning rate of the last step.", _last_step("lr")),
    Metric("samples_per_second", "Samples per second over the last 50 steps.", _speed("samples")),
    Metric(
        "units_per_second",
        "Units of the task, such as tokens, per second over the last 50 steps.",
        _speed("units"),
    ),
    Metric("step_seconds", "Mean time of the last 50 steps.", _speed("mean_step_s")),
    Metric("phase_seconds", "Time of each phase per step.", _phases, ("phase",)),
    Metric(
        "exchange_seconds",
        "Waiting time of the token exchange per step, mean over hosts.",
        _field(Exchange, "seconds"),
    ),
    Metric(
        "exchange_bytes",
        "Bytes sent to other hosts per step, summed over hosts.",
        _field(Exchange, "bytes"),
    ),
    Metric(
        "imbalance_ratio",
        "Time of the slowest host over the mean; 1 is balanced.",
        _one(lambda state: state.experts.imbalance()),
    ),
    Metric(
        "host_time_ratio", "Time of each host's experts over the mean of all hosts.", _host_times, ("host",)
    ),
    Metric("experts", "Experts of each layer.", _experts, ("layer",)),
    Metric(
        "busiest_expert_ratio",
        "Tokens of the busiest expert of each layer over the even share.",
        _expert_peaks,
        ("layer",),
    ),
    Metric(
        "expert_changes_total",
        "Changes of experts, with those that were undone, or repeated after a failure.",
        _expert_changes,
        ("change",),
    ),
    Metric("failures_total", "Failures of workers and of the run.", _count("failures")),
    Metric("recoveries_total", "Recoveries from failures.", _count("recoveries")),
    Metric("lost_steps_total", "Steps that were repeated after failures.", _count("lost_steps")),
    Metric("checkpoints_total", "Checkpoints written.", _count("checkpoints")),
    Metric("node_cpu_ratio", "CPU use of the main worker's node.", _node("cpu_percent", _PERCENT)),
    Metric("node_memory_used_bytes", "Used memory of the main worker's node.", _node("memory_used")),
    Metric("process_memory_bytes", "Resident memory of the main worker.", _node("process_memory")),
    Metric(
        "gpu_memory_used_bytes",
        "Used memory of the GPUs of the main worker's node.",
        _gpus("memory_used"),
        _GPU,
    ),
    Metric("gpu_memory_size_bytes", "Memory of these GPUs.", _gpus("memory_total"), _GPU),
    Metric("gpu_utilization_ratio", "Use of these GPUs.", _gpus("utilization", _PERCENT), _GPU),
    Metric("gpu_power_watts", "Power of these GPUs.", _gpus("power"), _GPU),
    Metric("gpu_temperature_celsius", "Temperature of these GPUs.", _gpus("temperature"), _GPU),
)
"""All metrics. Each also has the label ``run``, the name of the run folder."""


def exposition(state: RunState, run_name: str) -> bytes:
    """Return all metrics of a run as text."""
    return generate_latest(_Families(state, run_name))


class _Families(Collector):
    """The metrics of a state that have a sample, as the library wants them."""

    def __init__(self, state: RunState, run_name: str) -> None:
        self._state = state
        self._run_name = run_name

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            # The library adds the suffix to the names of counters again.
            family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
            for labels, value in metric.read(self._state):
                family.add_sample(metric.name, {"run": self._run_name, **dict(labels)}, value)
            if family.samples:
                yield family
