"""Forward, backward and optimizer time of a task, in the planned precision or in each one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.settings import Config
from orchestrator.measure.timed_steps import StepRunner, Summary, phase_seconds
from orchestrator.plan.planning import Plan
from orchestrator.record.files.log import ignore_event
from orchestrator.tasks.task import Task
from orchestrator.train.data.steps import as_dataset
from orchestrator.train.device.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.group.world import World
from orchestrator.train.worker.batch_probe import first_batch
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import Choice, PrecisionName


@dataclass(frozen=True)
class BenchResult:
    """One row of the bench. ``median`` and ``spread`` are seconds per step, by phase and in
    ``total``."""

    precision: str
    device: str
    batch_size: int
    iterations: int
    median: dict[str, float]
    spread: dict[str, float]
    samples_per_second: float
    peak_memory_bytes: int
    loss: float


def measure(config: Config, plan: Plan, task: Task, iterations: int) -> BenchResult:
    """Time whole training steps on one batch that stays on the device."""
    world = World.single_process(plan.device.value)
    batch_size = plan.batch_size.value
    # The memory of an earlier precision must not count.
    free_cached(world.device)
    reset_peak(world.device)
    with torch_settings(config, plan, world.device):
        runner = _build_runner(config, plan, task, world)
        times, loss = phase_seconds(runner, iterations, world.device)
    summaries = {phase: Summary.of(seconds) for phase, seconds in times.items()}
    in_tf32 = plan.precision.value == "fp32" and plan.tf32.value
    return BenchResult(
        precision="tf32" if in_tf32 else plan.precision.value,
        device=plan.device.value,
        batch_size=batch_size,
        iterations=iterations,
        median={phase: summary.median for phase, summary in summaries.items()},
        spread={phase: summary.spread for phase, summary in summaries.items()},
        samples_per_second=batch_size / summaries["total"].median,
        peak_memory_bytes=peak_memory(world.device)["allocated"],
        loss=loss,
    )


def _build_runner(config: Config, plan: Plan, task: Task, world: World) -> StepRunner:
    batch_size = plan.batch_size.value
    parts = build_parts(config, plan, task, world)
    stepper = build_stepper(config, world, parts, batch_size, ignore_event)
    return StepRunner(stepper, first_batch(as_dataset(task.train_data()), world, batch_size))


def measure_precisions(config: Config, plan: Plan, task: Task, iterations: int) -> list[BenchResult]:
    """Time the same steps in each precision of the device."""
    variants: list[tuple[PrecisionName, bool]] = [("fp32", False), ("bf16", False), ("fp16", False)]
    if plan.device.value != "cpu":
        variants.insert(1, ("fp32", True))
    if plan.precision.value == "fp8":  # the plan knows that this model and device can
        variants.append(("fp8", False))
    results = []
    for precision, tf32 in variants:
        variant = replace(plan, precision=Choice(precision, "bench"), tf32=Choice(tf32, "bench"))
        results.append(measure(config, variant, task, iterations))
    return results
