"""How long a GPU takes for whole steps, against the sum of what their operations take by themselves.

Alone, an operation finds a cool device with nothing before it. Within a step the device is as hot and as slow as its power allows,
there are pauses between kernels, and kernels that no trace tells of. One factor for all of that is found from steps that are large
enough for the host to be far ahead."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import torch

from orchestrator.config.settings import Config
from orchestrator.measure.model_facts import model_facts
from orchestrator.measure.step_trace import TraceOptions, trace_step
from orchestrator.measure.timed_steps import build_steps, step_seconds
from orchestrator.plan.cost.calibration import Reference
from orchestrator.plan.cost.machine import DeviceCosts, Machine, Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import plan
from orchestrator.tasks.load import load_task
from orchestrator.train.parts.world import World
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import PrecisionName

_STEPS, _WARM_UP = 24, 8


@dataclass(frozen=True)
class LargeModel:
    """A dense decoder of many tokens a step."""

    width: int
    context: int
    precision: PrecisionName
    layers: int = 3
    vocabulary: int = 5120
    tokens: int = 16384

    @property
    def name(self) -> str:
        return f"large decoder, width {self.width}, {self.layers} layers, {self.precision}"

    def config(self) -> tuple[Config, int]:
        """Its settings and its samples."""
        batch = self.tokens // self.context
        sizes = {
            "width": self.width,
            "context_length": self.context,
            "layers": self.layers,
            "vocabulary": self.vocabulary,
        }
        return Config.of(
            task="synthetic",
            experts=0,
            samples=batch,
            precision=self.precision,
            gpu_mode="single_gpu",
            **sizes,
        ), batch


LARGE = (LargeModel(1280, 512, "bf16"), LargeModel(896, 256, "fp32"))


@dataclass(frozen=True)
class LargeStep:
    """A large step: what it does, what was predicted of it, and what it took."""

    name: str
    work: MicroBatchOps
    predicted: StepPrediction
    measured_s: float

    @property
    def tells(self) -> bool:
        """Whether it was the device that took so long."""
        return self.predicted.parts["overhead"] == 0.0


def with_sustained(
    made: DeviceCosts, found: Inventory, device: torch.device
) -> tuple[DeviceCosts, tuple[Reference, ...]]:
    """The device with its factor, and the steps that say so. Of a device whose host is known already."""
    seen = [_seen(large, made, found, device) for large in LARGE if large.precision in made.products]
    factor = sustained([entry for entry in seen if entry.tells])
    return replace(made, sustained=factor), tuple(_reference(entry, factor) for entry in seen)


def sustained(seen: list[LargeStep]) -> float:
    """The mean of how many times as long the steps took; 1 where none tells."""
    ratios = [entry.measured_s / entry.predicted.step_seconds for entry in seen]
    return math.exp(statistics.mean(map(math.log, ratios))) if ratios else 1.0


def _seen(large: LargeModel, made: DeviceCosts, found: Inventory, device: torch.device) -> LargeStep:
    config, batch = large.config()
    task = load_task(config)
    chosen = plan(config, found, model_facts(task, str(device), large.precision))
    work = trace_step(task, batch, TraceOptions(True, large.precision, False))
    predicted = predict(work, Machine(made), Parallelism(tf32=chosen.tf32.value))
    with torch_settings(config, chosen, device):
        run = build_steps(config, chosen, task, World.single_process(device), batch)
        return LargeStep(
            large.name, work, predicted, statistics.median(step_seconds(run, _STEPS, _WARM_UP, device))
        )


def _reference(entry: LargeStep, factor: float) -> Reference:
    work, times = entry.work, factor if entry.tells else 1.0
    counts = work.operations, work.launches, work.sorts, work.views, work.tensors
    return Reference(entry.name, entry.measured_s, times * entry.predicted.step_seconds, *counts)
