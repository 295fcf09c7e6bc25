"""What the host needs for a step, apart from arithmetic: found from whole training steps, small ones of the same blocks that real models
are made of, with their autocast, autograd and optimizer.

On a GPU what is timed is how long the host takes to hand a step over, whatever the device then does with it. So these steps may have as
many rows and features as real ones, for which torch and its libraries take other kernels than for few. On a CPU, where nothing is handed
over, they are so small that the overhead is nearly all they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.measure.fit import not_negative
from orchestrator.measure.model_facts import model_facts
from orchestrator.measure.op_times import updating
from orchestrator.measure.step_trace import TraceOptions, trace_step
from orchestrator.measure.timed_steps import StepRunner, build_steps, step_seconds, submit_seconds
from orchestrator.measure.timer import Timer
from orchestrator.plan.cost.calibration import Reference
from orchestrator.plan.cost.machine import DeviceCosts, Machine
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.tasks.load import load_task
from orchestrator.tasks.task import Task
from orchestrator.train.parts.world import World
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import PrecisionName

_STEPS, _TURNS, _READ = 12, 4, 16
_FEW, _MANY = 8, 72  # parameters of the two updates that are compared


@dataclass(frozen=True)
class ReferenceModel:
    """A reference: blocks of a kind, dense or with experts, and in which arithmetic."""

    kind: Literal["classifier", "decoder"]
    experts: int
    layers: int
    precision: PrecisionName = "fp32"

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.layers} layers, {self.experts} experts, {self.precision}"

    def config(self, on_gpu: bool) -> tuple[Config, int]:
        """Its settings and its samples."""
        width, context, batch = (384, 128, 32) if on_gpu else (16, 4, 2)
        if self.kind == "classifier":
            context, batch = 0, batch * max(1, context if on_gpu else 1)
        sizes: dict[str, Any] = {
            "width": width,
            "context_length": context,
            "samples": max(64, batch),
            "layers": self.layers,
        }
        if self.experts:
            sizes["expert_hidden_size"] = width
        where = "single_gpu" if on_gpu else "cpu"
        return Config.of(
            task="synthetic", experts=self.experts, precision=self.precision, gpu_mode=where, **sizes
        ), batch


FORMS = (
    ReferenceModel("classifier", 0, 1),
    ReferenceModel("classifier", 0, 6),
    ReferenceModel("classifier", 4, 1),
    ReferenceModel("classifier", 4, 4),
    ReferenceModel("decoder", 0, 1),
    ReferenceModel("decoder", 0, 5),
    ReferenceModel("decoder", 4, 3),
)
IN_BF16 = (*FORMS, ReferenceModel("decoder", 4, 1))
YARDSTICK = ReferenceModel("decoder", 0, 2), ReferenceModel("decoder", 4, 2)


def forms_for(made: DeviceCosts) -> tuple[ReferenceModel, ...]:
    """On a GPU in the arithmetic that it is used in, and without experts in fp32 too: the same blocks without autocast's copies."""
    if _arithmetic(made) == "fp32":
        return FORMS
    return (
        *(replace(form, precision="bf16") for form in IN_BF16),
        *(form for form in FORMS if not form.experts),
    )


def _arithmetic(made: DeviceCosts) -> PrecisionName:
    return "bf16" if made.asynchronous and "bf16" in made.products else "fp32"


def with_overhead(
    made: DeviceCosts, found: Inventory, device: torch.device, timer: Timer, most: int | None = None
) -> tuple[DeviceCosts, tuple[Reference, ...]]:
    """The device with the seconds of its host: for each operation, kernel launched from Python, sort, view and parameter, and for a step
    as such. Beside it the reference steps that say so, of which ``most`` are taken."""
    forms = forms_for(made)[:most]
    chosen = [_chosen(form, found, device) for form in forms]
    works = [_traced(*pair, made) for pair in zip(forms, chosen, strict=True)]
    measured = _measured(chosen)
    tensor_s = parameter_seconds(timer)
    explained = [0.0 if made.asynchronous else predict(work, Machine(made)).step_seconds for work in works]
    left = [
        max(0.0, s - known - tensor_s * work.tensors)
        for s, known, work in zip(measured, explained, works, strict=True)
    ]
    operation, launch, sort, view, step = host_figures(works, left)
    fitted = replace(
        made, operation_s=operation, launch_s=launch, sort_s=sort, view_s=view, tensor_s=tensor_s, step_s=step
    )
    return fitted, tuple(
        _reference(*entry, fitted) for entry in zip(forms, works, measured, explained, strict=True)
    )


def host_figures(works: Sequence[MicroBatchOps], seconds: Sequence[float]) -> list[float]:
    """Of an operation, a launch, a sort, a view and a step: those that explain what the host takes for these works."""
    rows = np.array([[work.operations, work.launches, work.sorts, work.views, 1.0] for work in works])
    return not_negative(rows, np.array(seconds))


def yardstick(made: DeviceCosts, found: Inventory, device: torch.device) -> Callable[[], tuple[float, ...]]:
    """Times the host of a GPU by two steps, one dense and one with experts, built anew each time. Read at the calibration and again
    later it says how much slower the host has become: hosts are shared, and not equally fast from one minute to the next."""
    chosen = [_chosen(replace(form, precision=_arithmetic(made)), found, device) for form in YARDSTICK]

    def read() -> tuple[float, ...]:
        return tuple(entry.seconds(entry.built(), _READ) for entry in chosen)

    return read


@dataclass(frozen=True)
class ReferenceStep:
    """A reference step: how it is built and timed, as a run would."""

    config: Config
    plan: Plan
    task: Task
    batch: int
    device: torch.device

    def built(self) -> StepRunner:
        with torch_settings(self.config, self.plan, self.device):
            return build_steps(
                self.config, self.plan, self.task, World.single_process(self.device), self.batch
            )

    def seconds(self, run: StepRunner, steps: int) -> float:
        """Of the host of a GPU, or of a CPU: the median."""
        timed: Callable[..., list[float]] = submit_seconds if self.device.type == "cuda" else step_seconds
        with torch_settings(self.config, self.plan, self.device):
            return statistics.median(timed(run, steps, device=self.device))


def _chosen(form: ReferenceModel, found: Inventory, device: torch.device) -> ReferenceStep:
    config, batch = form.config(device.type == "cuda")
    task = load_task(config)
    return ReferenceStep(
        config, plan(config, found, model_facts(task, str(device), form.precision)), task, batch, device
    )


def _traced(form: ReferenceModel, chosen: ReferenceStep, made: DeviceCosts) -> MicroBatchOps:
    grouped = made.grouped is None or (len(made.grouped.sizes) > 1 and form.precision == "bf16")
    return trace_step(chosen.task, chosen.batch, TraceOptions(made.asynchronous, form.precision, grouped))


def _measured(chosen: list[ReferenceStep]) -> list[float]:
    """Of each its median. They are taken in turn, several times: a host is not equally fast from one second to the next."""
    runs = [entry.built() for entry in chosen]
    turns = [
        [entry.seconds(run, _STEPS) for entry, run in zip(chosen, runs, strict=True)] for _ in range(_TURNS)
    ]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def parameter_seconds(timer: Timer) -> float:
    """What each further parameter costs the host in an update, however small it is."""
    few, many = (
        timer.host(updating([nn.Parameter(torch.randn(16, device=timer.device)) for _ in range(count)]))
        for count in (_FEW, _MANY)
    )
    return max(0.0, many - few) / (_MANY - _FEW)


def _reference(
    form: ReferenceModel, work: MicroBatchOps, measured: float, explained: float, fitted: DeviceCosts
) -> Reference:
    host = predict(replace(work, parameters=0), Machine(fitted)).host_seconds
    return Reference(
        form.name,
        measured,
        explained + host,
        work.operations,
        work.launches,
        work.sorts,
        work.views,
        work.tensors,
    )
