"""The slowdown of a GPU within whole steps, against the sum of its operations timed alone.

An operation alone finds a cool device with nothing queued before it. Within a step the device is
as hot and as slow as its power limit allows, there are pauses between kernels, and there are
kernels that no trace shows. One factor covers all of that. It is measured with steps so large that
the host is far ahead of the device.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import torch

from orchestrator.config.settings import Config
from orchestrator.measure.timed_steps import Summary, build_step_runner, step_seconds
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.calibration import Reference
from orchestrator.plan.cost.machine import DeviceCosts, Machine, Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import plan
from orchestrator.tasks.load import load_task
from orchestrator.train.group.world import World
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import PrecisionName

_STEPS = 24
_WARM_UP = 8  # more than elsewhere: the device must heat up


@dataclass(frozen=True)
class LargeModel:
    """A dense decoder with many tokens in a step."""

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
        """Return the settings and the number of samples in a step."""
        batch = self.tokens // self.context
        config = Config.of(
            task="synthetic",
            experts=0,
            samples=batch,
            precision=self.precision,
            gpu_mode="single_gpu",
            width=self.width,
            sequence_length=self.context,
            layers=self.layers,
            vocabulary=self.vocabulary,
        )
        return config, batch


LARGE_MODELS = (LargeModel(1280, 512, "bf16"), LargeModel(896, 256, "fp32"))


@dataclass(frozen=True)
class LargeStep:
    """A large step: its operations, its prediction, and its measured seconds."""

    name: str
    ops: MicroBatchOps
    predicted: StepPrediction
    measured_s: float

    @property
    def is_device_bound(self) -> bool:
        """Whether the device, and not the host, set the time."""
        return self.predicted.parts["overhead"] == 0.0


def with_sustained(
    costs: DeviceCosts, inventory: Inventory, device: torch.device
) -> tuple[DeviceCosts, tuple[Reference, ...]]:
    """Return the costs with the slowdown, and the steps that show it. The costs of the host must
    be known."""
    models = [model for model in LARGE_MODELS if model.precision in costs.products]
    steps = [_measure(model, costs, inventory, device) for model in models]
    slowdown = sustained_slowdown([step for step in steps if step.is_device_bound])
    return replace(costs, sustained=slowdown), tuple(_reference(step, slowdown) for step in steps)


def sustained_slowdown(steps: list[LargeStep]) -> float:
    """Return the geometric mean of measured over predicted time; 1 without steps."""
    ratios = [step.measured_s / step.predicted.step_seconds for step in steps]
    return math.exp(statistics.mean(map(math.log, ratios))) if ratios else 1.0


def _measure(model: LargeModel, costs: DeviceCosts, inventory: Inventory, device: torch.device) -> LargeStep:
    config, batch = model.config()
    task = load_task(config)
    chosen = plan(config, inventory, model_facts(task, str(device), model.precision))
    ops = trace_micro_batch(task, batch, TraceOptions(on_gpu=True, precision=model.precision, grouped=False))
    predicted = predict(ops, Machine(costs), Parallelism(tf32=chosen.tf32.value))
    with torch_settings(config, chosen, device):
        runner = build_step_runner(config, chosen, task, World.single_process(device), batch)
        seconds = step_seconds(runner, _STEPS, _WARM_UP, device)
    return LargeStep(model.name, ops, predicted, Summary.of(seconds).median)


def _reference(step: LargeStep, slowdown: float) -> Reference:
    ops = step.ops
    applied = slowdown if step.is_device_bound else 1.0
    return Reference(
        name=step.name,
        measured_s=step.measured_s,
        fitted_s=applied * step.predicted.step_seconds,
        operations=ops.operations,
        launches=ops.launches,
        sorts=ops.sorts,
        views=ops.views,
        tensors=ops.tensors,
    )
