"""What the host needs for a step, apart from arithmetic: found from whole training steps, small ones of the same blocks that real models
are made of, with their autocast, autograd and optimizer.

On a GPU what is timed is how long the host takes to hand a step over, whatever the device then does with it. So these steps may have as
many rows as real ones: torch sorts and looks up many rows by more kernels than few. On a CPU, where nothing is handed over, they are so
small that the overhead is nearly all they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.plan.calibration import Reference
from orchestrator.plan.costmodel import Device, Machine, predict
from orchestrator.plan.hardware import Inventory
from orchestrator.plan.planning import Arithmetic, plan
from orchestrator.plan.work import Work
from orchestrator.tasks.load import load_task
from orchestrator.train.assemble import machine_settings
from orchestrator.train.facts import model_facts
from orchestrator.train.fitting import not_negative
from orchestrator.train.measuring import updating
from orchestrator.train.stepping import Steps, build_steps, handed_over_seconds, step_seconds
from orchestrator.train.timing import Timer
from orchestrator.train.tracing import Setting, trace_step
from orchestrator.train.world import World

_STEPS, _TURNS = 12, 4
_FEW, _MANY = 8, 72  # parameters of the two updates that are compared


@dataclass(frozen=True)
class Form:
    """A reference: blocks of a kind, dense or with experts, and in which arithmetic."""

    kind: Literal["classifier", "decoder"]
    experts: int
    layers: int
    precision: Arithmetic = "fp32"

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.layers} layers, {self.experts} experts, {self.precision}"

    def config(self, on_gpu: bool) -> tuple[Config, int]:
        """Its settings and its samples."""
        width, context, batch = (64, 128, 32) if on_gpu else (16, 4, 2)
        if self.kind == "classifier":
            context, batch = 0, batch * max(1, context if on_gpu else 1)
        sizes: dict[str, Any] = {"width": width, "context_length": context, "samples": max(64, batch), "layers": self.layers}
        if self.experts:
            sizes["expert_hidden_size"] = width
        where = "single_gpu" if on_gpu else "cpu"
        return Config.of(task="synthetic", experts=self.experts, precision=self.precision, gpu_mode=where, **sizes), batch


FORMS = (
    Form("classifier", 0, 1),
    Form("classifier", 0, 6),
    Form("classifier", 4, 1),
    Form("classifier", 4, 4),
    Form("decoder", 0, 1),
    Form("decoder", 0, 5),
    Form("decoder", 4, 3),
)


def forms_for(made: Device) -> tuple[Form, ...]:
    """On a GPU in the arithmetic that it is used in, and without experts in fp32 too: the same blocks without autocast's copies."""
    if not made.asynchronous or "bf16" not in made.products:
        return FORMS
    return (*(replace(form, precision="bf16") for form in FORMS), *(form for form in FORMS if not form.experts))


def with_overhead(
    made: Device, found: Inventory, device: torch.device, timer: Timer, most: int | None = None
) -> tuple[Device, tuple[Reference, ...]]:
    """The device with the seconds of its host: for each operation, kernel launched from Python, view and parameter, and for a step as
    such. Beside it the reference steps that say so, of which ``most`` are taken."""
    forms = forms_for(made)[:most]
    prepared = [_prepared(form, made, found, device) for form in forms]
    works = [work for work, _ in prepared]
    measured = _measured([steps for _, steps in prepared], device)
    tensor_s = parameter_seconds(timer)
    explained = [0.0 if made.asynchronous else predict(work, Machine(made)).step_seconds for work in works]
    left = [max(0.0, s - known - tensor_s * work.tensors) for s, known, work in zip(measured, explained, works, strict=True)]
    operation, launch, view, step = host_figures(works, left)
    fitted = replace(made, operation_s=operation, launch_s=launch, view_s=view, tensor_s=tensor_s, step_s=step)
    return fitted, tuple(_reference(*entry, fitted) for entry in zip(forms, works, measured, explained, strict=True))


def host_figures(works: Sequence[Work], seconds: Sequence[float]) -> list[float]:
    """Of an operation, a launch, a view and a step: those that explain what the host takes for these works."""
    rows = np.array([[work.operations, work.launches, work.views, 1.0] for work in works])
    return not_negative(rows, np.array(seconds))


def _prepared(form: Form, made: Device, found: Inventory, device: torch.device) -> tuple[Work, Steps]:
    config, batch = form.config(made.asynchronous)
    task = load_task(config)
    chosen = plan(config, found, model_facts(task, str(device), form.precision))
    grouped = made.grouped is None or (len(made.grouped.sizes) > 1 and form.precision == "bf16")
    work = trace_step(task, batch, Setting(made.asynchronous, form.precision, grouped))
    with machine_settings(config, chosen, device):
        return work, build_steps(config, chosen, task, World.alone(device), batch)


def _measured(runs: list[Steps], device: torch.device) -> list[float]:
    """Of each its median. They are taken in turn, several times: a host is not equally fast from one second to the next."""
    timed: Callable[..., list[float]] = handed_over_seconds if device.type == "cuda" else step_seconds
    turns = [[statistics.median(timed(run, _STEPS, device=device)) for run in runs] for _ in range(_TURNS)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def parameter_seconds(timer: Timer) -> float:
    """What each further parameter costs the host in an update, however small it is."""
    few, many = (
        timer.host(updating([nn.Parameter(torch.randn(16, device=timer.device)) for _ in range(count)])) for count in (_FEW, _MANY)
    )
    return max(0.0, many - few) / (_MANY - _FEW)


def _reference(form: Form, work: Work, measured: float, explained: float, fitted: Device) -> Reference:
    host = predict(replace(work, parameters=0), Machine(fitted)).host_seconds
    return Reference(form.name, measured, explained + host, work.operations, work.launches, work.views, work.tensors)
