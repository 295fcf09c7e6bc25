"""Forward, backward and optimizer time of a task, and the same in each precision. Measured, never assumed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from orchestrator.config.settings import Config
from orchestrator.plan.planning import Plan
from orchestrator.tasks.task import Task
from orchestrator.train.data import as_dataset
from orchestrator.train.parts.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.parts.world import World
from orchestrator.train.worker.batch_probe import first_batch
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import Choice, PrecisionName

_WARM_UP = 5


@dataclass(frozen=True)
class BenchResult:
    """One row: times are seconds per step, median and half the spread between quartiles."""

    precision: str
    device: str
    batch_size: int
    iterations: int
    median: dict[str, float]
    spread: dict[str, float]
    samples_per_second: float
    peak_memory_bytes: int
    loss: float


def measure(config: Config, chosen: Plan, task: Task, iterations: int) -> BenchResult:
    """Whole training steps on one batch that stays on the device; warm-up left out."""
    world = World.single_process(chosen.device.value)
    free_cached(world.device)
    reset_peak(world.device)
    with torch_settings(config, chosen, world.device):
        times, loss = _times(config, chosen, task, world, iterations)
    median = {name: statistics.median(values) for name, values in times.items()}
    quarters = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    batch = chosen.batch_size.value
    return BenchResult(
        precision="tf32"
        if chosen.precision.value == "fp32" and chosen.tf32.value
        else chosen.precision.value,
        device=chosen.device.value,
        batch_size=batch,
        iterations=iterations,
        median=median,
        spread={name: (q[2] - q[0]) / 2 for name, q in quarters.items()},
        samples_per_second=batch / median["total"],
        peak_memory_bytes=peak_memory(world.device)["allocated"],
        loss=loss,
    )


def _times(
    config: Config, chosen: Plan, task: Task, world: World, iterations: int
) -> tuple[dict[str, list[float]], float]:
    parts = build_parts(config, chosen, task, world)
    stepper = build_stepper(config, world, parts, chosen.batch_size.value, lambda event, **fields: None)  # noqa: ARG005
    clock = _WaitingClock(world.device)
    stepper.clock = clock  # pyright: ignore[reportAttributeAccessIssue]
    portion = first_batch(as_dataset(task.train_data()), world, chosen.batch_size.value)
    loss = 0.0
    for step in range(_WARM_UP + iterations):
        if step == _WARM_UP:
            clock.times = {}
        clock.begin()
        totals = stepper.run(portion, step)
        clock.end()
        loss = float(totals.loss) / float(totals.count)
    return clock.times, loss


class _WaitingClock:
    """Waits for the device at each mark: exact phases, where speed is not the point."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: dict[str, list[float]] = {}
        self._step: dict[str, float] = {}
        self._last = self._begun = 0.0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def begin(self) -> None:
        self._step = {}
        self._begun = self._last = self._now()

    def mark(self, phase: str) -> None:
        now = self._now()
        self._step[phase] = self._step.get(phase, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        self._step["total"] = self._now() - self._begun
        for name, value in self._step.items():
            self.times.setdefault(name, []).append(value)


def measure_precisions(config: Config, chosen: Plan, task: Task, iterations: int) -> list[BenchResult]:
    """The same steps in each precision that the device has."""
    on_gpu = chosen.device.value != "cpu"
    variants: list[tuple[PrecisionName, bool]] = [
        ("fp32", False),
        *([("fp32", True)] if on_gpu else []),
        ("bf16", False),
        ("fp16", False),
    ]
    plans = [
        replace(chosen, precision=Choice(precision, "bench"), tf32=Choice(tf32, "bench"))
        for precision, tf32 in variants
    ]
    return [measure(config, one, task, iterations) for one in plans]
