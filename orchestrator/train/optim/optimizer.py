"""The optimizer with its learning-rate schedule, and the scaling and clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.host_copy import to_host
from orchestrator.config.sections.optim import Schedule
from orchestrator.train.optim.adamw import AdamW, has_fp64
from orchestrator.train.optim.stochastic_rounding import WeightRounding
from orchestrator.train.optim.weight_average import WeightAverage

MIN_LR_FACTOR = 0.1  # of the peak learning rate, at the end of the cosine
WSD_DECAY = 0.2  # part of the run in which a wsd schedule decays


def warmup_schedule(schedule: Schedule, warmup: int, total: int | None) -> Callable[[int], float]:
    """Return the learning-rate factor by step (from 0): warm-up, then the schedule of that name.

    Where the total number of steps is unknown, the factor is constant after the warm-up."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule == "constant" or total is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        if schedule == "linear":
            return 1 - done
        if schedule == "wsd":
            # A share of the whole run, warm-up included: one chooses the decay by the length of a run.
            return min(1.0, max(0.0, (total - step) / max(1.0, WSD_DECAY * total)))
        return MIN_LR_FACTOR + (1 - MIN_LR_FACTOR) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


class ScheduledOptimizer:
    """An optimizer and its schedule.

    The learning rate follows from the step, so the schedule has no state to save.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        schedule: Schedule | None = None,
        average: WeightAverage | None = None,
        rounding: WeightRounding | None = None,
    ) -> None:
        """``schedule`` names the configured schedule; a task's own has no name and is never rebuilt.

        ``average`` follows the weights. ``rounding`` writes those that are stored in bf16."""
        self.inner = optimizer
        self.rounding = rounding
        self.average = average
        self.factor = factor
        self._schedule: Schedule | None = schedule
        self.parameters_changed()
        self._peak_lrs = [
            float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups
        ]
        self.keeps_rates = False
        """Whether the groups keep their learning rates in a step, as in the capture of a graph."""
        # Fused optimizers read ``found_inf`` on the device and skip the update themselves.
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def parameters_changed(self) -> None:
        """Take over the parameters that the groups have now."""
        if self.rounding is not None:
            self.rounding.parameters_changed()
        self.parameters = [p for group in self.inner.param_groups for p in group["params"]]
        # A graph reads rates from the device in fp32. Where one may be captured, all steps round them alike.
        self._in_fp32 = any(p.is_cuda for p in self.parameters) and not has_fp64(self.parameters)

    def reschedule(self, warmup: int, total: int | None) -> None:
        """Rebuild the configured schedule for another number of steps."""
        if self._schedule is not None:
            self.factor = warmup_schedule(self._schedule, warmup, total)

    @property
    def peak_rates(self) -> tuple[float, ...]:
        """The learning rate of each group, before the factor of a step."""
        return tuple(self._peak_lrs)

    def learning_rate(self, step: int) -> float:
        return self._peak_lrs[0] * self.factor(step)

    def step(self, step: int, finite: Tensor | None) -> None:
        """Update the weights, unless ``finite`` says that the gradients overflowed, and their average."""
        stepped = self._update_weights(step, finite)
        if isinstance(self.inner, AdamW):
            self.inner.gradient_factor = None
        if self.average is not None:
            self.average.update(stepped)

    def scale_gradients(self, gradients: list[Tensor], factor: float | Tensor) -> None:
        """Multiply gradients by a factor: in the next step, where the optimizer does, or at once."""
        if isinstance(self.inner, AdamW) and isinstance(factor, Tensor):
            self.inner.gradient_factor = factor
        else:
            scale_gradients(gradients, factor)

    def set_rates(self, step: int) -> None:
        """Give each group its learning rate of a step."""
        factor = self.factor(step)
        for group, peak in zip(self.inner.param_groups, self._peak_lrs, strict=True):
            rate = peak * factor
            group["lr"] = float(np.float32(rate)) if self._in_fp32 else rate

    def _update_weights(self, step: int, finite: Tensor | None) -> bool:
        """Return whether the optimizer's step was called, which may skip the update on the device."""
        if not self.keeps_rates:
            self.set_rates(step)
        if finite is None:
            self._step_inner(step)
        elif self._skips_on_device:
            handle: Any = self.inner
            handle.found_inf = (~finite).float()
            self._step_inner(step)
            del handle.found_inf
        elif bool(to_host(finite)):
            self._step_inner(step)
        else:
            return False
        return True

    def _step_inner(self, step: int) -> None:
        if self.rounding is not None:
            self.rounding.step(step, self._update_in_type)
        else:
            self._update_in_type()

    def _update_in_type(self) -> None:
        """Update the parameters of the optimizer's groups in their own type."""
        if isinstance(self.inner, torch.optim.SGD):
            _start_momentum(self.inner)
        self.inner.step()


@torch.no_grad()
def _start_momentum(optimizer: torch.optim.SGD) -> None:
    """Give parameters before their first fused step a momentum of zero, from which that step is the same.

    Without it, torch leaves the momentum uninitialised if the gradients of the first step overflow, and
    fails if a parameter has its first gradient later than others. With dampening the step is not the same."""
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"] or group["dampening"]:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def clip_factor(norm: Tensor, factor: float | Tensor, clip_norm: float) -> tuple[Tensor, float | Tensor]:
    """Return the norm of gradients times ``factor``, and the factor that clips their global norm too.

    ``norm`` is the norm before the multiplication."""
    if isinstance(factor, Tensor):
        factor = factor.to(norm.device)
    if isinstance(factor, Tensor) or factor != 1.0:
        norm = norm * factor
    if clip_norm > 0:
        factor = (factor * clip_norm) / norm.clamp(min=clip_norm)
    return norm, factor


def scale_gradients(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients by a factor, in one pass over them."""
    if not gradients:
        return
    if isinstance(factor, Tensor) and factor.device.type == "cpu":
        # Reading it makes nobody wait, and a factor of one saves a pass over the gradients.
        factor = float(factor)
    if isinstance(factor, Tensor):
        # The widest type: the factor of gradients of several types is not rounded to a shorter one.
        factor = factor.to(reduce(torch.promote_types, (gradient.dtype for gradient in gradients)))
        torch._foreach_mul_(gradients, factor)
    elif factor != 1.0:
        torch._foreach_mul_(gradients, factor)
