"""Costs that only whole training steps of reference models show: the host's overhead per operation, and the
slowdown of a GPU under load.

The references of the overhead are made of the same blocks as real models, with autocast, autograd and
optimizer. On a GPU the host's time to submit a step is measured, whatever the device then does with it. So
these steps may have as many rows and features as real ones, for which torch and its libraries
choose other kernels than for few. On a CPU, where nothing is submitted, they are so small that
overhead is nearly all of their time.

The slowdown is against the sum of a step's operations timed alone. An operation alone finds a cool device
with nothing queued before it. Within a step the device is as hot and as slow as its power limit allows, there
are pauses between kernels, and there are kernels that no trace shows. One factor covers all of that. It is
measured with steps so large that the host is far ahead of the device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.measure.calibration.op_times import make_update
from orchestrator.measure.calibration.timer import Timer, fit_nonnegative
from orchestrator.measure.timed_steps import (
    StepRunner,
    Summary,
    build_step_runner,
    step_seconds,
    submit_seconds,
)
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.calibration import Reference
from orchestrator.plan.cost.machine import DeviceCosts, Machine, Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.tasks.load import load_task
from orchestrator.tasks.task import Task
from orchestrator.train.group.world import World
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import PrecisionName

_STEPS = 12
_ROUNDS = 4
_YARDSTICK_STEPS = 16
_LARGE_STEPS = 24
_LARGE_WARM_UP = 8  # more than elsewhere: the device must heat up
# Parameters of the two updates whose difference is the cost of a parameter.
_FEW_PARAMETERS = 8
_MANY_PARAMETERS = 72


@dataclass(frozen=True)
class ReferenceModel:
    """A reference: blocks of one kind, dense or with experts, in one precision."""

    kind: Literal["classifier", "decoder"]
    experts: int
    layers: int
    precision: PrecisionName = "fp32"

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.layers} layers, {self.experts} experts, {self.precision}"

    def config(self, on_gpu: bool) -> tuple[Config, int]:
        """Return the settings and the number of samples in a step."""
        width, context, batch = (384, 128, 32) if on_gpu else (16, 4, 2)
        if self.kind == "classifier":
            # As many rows as the decoder has tokens.
            batch *= context if on_gpu else 1
            context = 0
        settings: dict[str, Any] = {"expert_hidden_size": width} if self.experts else {}
        config = Config.of(
            task="synthetic",
            experts=self.experts,
            precision=self.precision,
            gpu_mode="single_gpu" if on_gpu else "cpu",
            width=width,
            sequence_length=context,
            samples=max(64, batch),
            layers=self.layers,
            **settings,
        )
        return config, batch


REFERENCE_MODELS = (
    ReferenceModel("classifier", 0, 1),
    ReferenceModel("classifier", 0, 6),
    ReferenceModel("classifier", 4, 1),
    ReferenceModel("classifier", 4, 4),
    ReferenceModel("decoder", 0, 1),
    ReferenceModel("decoder", 0, 5),
    ReferenceModel("decoder", 4, 3),
)
_BF16_MODELS = (*REFERENCE_MODELS, ReferenceModel("decoder", 4, 1))
_YARDSTICK_MODELS = (ReferenceModel("decoder", 0, 2), ReferenceModel("decoder", 4, 2))


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

    def config(self, on_gpu: bool = True) -> tuple[Config, int]:
        """Return the settings and the number of samples in a step, whose size is that for a GPU."""
        del on_gpu
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
class ReferenceStep:
    """A step of a reference model, built and timed as in a run."""

    name: str
    config: Config
    batch: int
    plan: Plan
    task: Task
    device: torch.device

    @classmethod
    def of(
        cls, model: ReferenceModel | LargeModel, inventory: Inventory, device: torch.device
    ) -> ReferenceStep:
        config, batch = model.config(device.type == "cuda")
        task = load_task(config)
        facts = model_facts(task, str(device), model.precision)
        return cls(model.name, config, batch, plan(config, inventory, facts), task, device)

    def trace(self, on_gpu: bool, grouped: bool) -> MicroBatchOps:
        options = TraceOptions(on_gpu, self.plan.precision.value, grouped)
        return trace_micro_batch(self.task, self.batch, options)

    def build(self) -> StepRunner:
        world = World.single_process(self.device)
        with torch_settings(self.config, self.plan, self.device):
            return build_step_runner(self.config, self.plan, self.task, world, self.batch)

    def median_seconds(self, runner: StepRunner, steps: int) -> float:
        """Return the median seconds of the host of a GPU, or of a CPU."""
        time_steps = submit_seconds if self.device.type == "cuda" else step_seconds
        with torch_settings(self.config, self.plan, self.device):
            return Summary.of(time_steps(runner, steps, device=self.device)).median

    def sustained_seconds(self) -> float:
        """Return the median seconds of the device, after a warm-up in which it heats up."""
        runner = self.build()
        with torch_settings(self.config, self.plan, self.device):
            return Summary.of(step_seconds(runner, _LARGE_STEPS, _LARGE_WARM_UP, self.device)).median


# --- the host's overhead


def reference_models(costs: DeviceCosts) -> tuple[ReferenceModel, ...]:
    """Return the references of a device.

    A GPU runs them in the precision that it is used in, and the dense ones in fp32 too: the same
    blocks without the copies of autocast.
    """
    if _precision(costs) == "fp32":
        return REFERENCE_MODELS
    in_bf16 = [replace(model, precision="bf16") for model in _BF16_MODELS]
    dense = [model for model in REFERENCE_MODELS if not model.experts]
    return (*in_bf16, *dense)


def _precision(costs: DeviceCosts) -> PrecisionName:
    return "bf16" if costs.asynchronous and "bf16" in costs.products else "fp32"


def with_overhead(
    costs: DeviceCosts,
    inventory: Inventory,
    device: torch.device,
    timer: Timer,
    max_references: int | None = None,
) -> tuple[DeviceCosts, tuple[Reference, ...]]:
    """Return the costs with those of the host, and the reference steps that show them.

    The host has a cost for each operation, kernel launched from Python, sort, view and parameter,
    and for a step.
    """
    models = reference_models(costs)[:max_references]
    steps = [ReferenceStep.of(model, inventory, device) for model in models]
    traced = [_trace(step, costs) for step in steps]
    measured = _median_seconds(steps)
    tensor_s = parameter_seconds(timer)
    # On a CPU a part of the time is computation, which the other costs explain.
    computed = [0.0 if costs.asynchronous else predict(ops, Machine(costs)).step_seconds for ops in traced]
    unexplained = [
        max(0.0, seconds - known - tensor_s * ops.tensors)
        for seconds, known, ops in zip(measured, computed, traced, strict=True)
    ]
    operation_s, launch_s, sort_s, view_s, step_s = fit_host_costs(traced, unexplained)
    fitted = replace(
        costs,
        operation_s=operation_s,
        launch_s=launch_s,
        sort_s=sort_s,
        view_s=view_s,
        tensor_s=tensor_s,
        step_s=step_s,
    )
    fitted_s = [
        known + predict(replace(ops, parameters=0), Machine(fitted)).host_seconds
        for ops, known in zip(traced, computed, strict=True)
    ]
    names = [model.name for model in models]
    return fitted, tuple(map(Reference.of, names, traced, measured, fitted_s))


def fit_host_costs(traced: Sequence[MicroBatchOps], seconds: Sequence[float]) -> list[float]:
    """Return the host's seconds for an operation, a launch, a sort, a view and a step that explain
    these times."""
    rows = np.array([[ops.operations, ops.launches, ops.sorts, ops.views, 1.0] for ops in traced])
    return fit_nonnegative(rows, np.array(seconds))


def make_yardstick(
    costs: DeviceCosts, inventory: Inventory, device: torch.device
) -> Callable[[], tuple[float, ...]]:
    """Return a function that times a GPU's host by two steps, one dense and one with experts,
    built each time.

    Called during the calibration and again later, it shows how much slower the host has become:
    hosts are shared, and their speed varies from one minute to the next.
    """
    precision = _precision(costs)
    models = [replace(model, precision=precision) for model in _YARDSTICK_MODELS]
    steps = [ReferenceStep.of(model, inventory, device) for model in models]

    def measure() -> tuple[float, ...]:
        return tuple(step.median_seconds(step.build(), _YARDSTICK_STEPS) for step in steps)

    return measure


def _trace(step: ReferenceStep, costs: DeviceCosts) -> MicroBatchOps:
    fused = costs.grouped is not None and len(costs.grouped.sizes) > 1
    grouped = costs.grouped is None or (fused and step.plan.precision.value == "bf16")
    return step.trace(costs.asynchronous, grouped)


def _median_seconds(steps: list[ReferenceStep]) -> list[float]:
    """Return the median of each step over several rounds: the speed of a host varies from second
    to second."""
    runners = [step.build() for step in steps]
    rounds = [
        [step.median_seconds(runner, _STEPS) for step, runner in zip(steps, runners, strict=True)]
        for _ in range(_ROUNDS)
    ]
    return [statistics.median(seconds) for seconds in zip(*rounds, strict=True)]


def parameter_seconds(timer: Timer) -> float:
    """Return the host's seconds for one more parameter in an update, however small it is."""

    def update_seconds(num_parameters: int) -> float:
        parameters = [nn.Parameter(torch.randn(16, device=timer.device)) for _ in range(num_parameters)]
        return timer.host_seconds(make_update(parameters))

    few = update_seconds(_FEW_PARAMETERS)
    many = update_seconds(_MANY_PARAMETERS)
    return max(0.0, many - few) / (_MANY_PARAMETERS - _FEW_PARAMETERS)


# --- the slowdown of a GPU under load


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
    references: list[Reference] = []
    for step in steps:
        factor = slowdown if step.is_device_bound else 1.0
        fitted_s = factor * step.predicted.step_seconds
        references.append(Reference.of(step.name, step.ops, step.measured_s, fitted_s))
    return replace(costs, sustained=slowdown), tuple(references)


def sustained_slowdown(steps: list[LargeStep]) -> float:
    """Return the geometric mean of measured over predicted time; 1 without steps."""
    ratios = [step.measured_s / step.predicted.step_seconds for step in steps]
    return math.exp(statistics.mean(map(math.log, ratios))) if ratios else 1.0


def _measure(model: LargeModel, costs: DeviceCosts, inventory: Inventory, device: torch.device) -> LargeStep:
    step = ReferenceStep.of(model, inventory, device)
    ops = step.trace(on_gpu=True, grouped=False)
    predicted = predict(ops, Machine(costs), Parallelism(tf32=step.plan.tf32.value))
    return LargeStep(step.name, ops, predicted, step.sustained_seconds())
