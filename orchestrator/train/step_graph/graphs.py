"""Steps that a graph repeats: one launch in place of the hundreds that Python makes.

A graph is captured for a layout of batches that came several times. Other steps run as without graphs: the
first ones, the short last batch of an epoch, and all of a run whose step cannot be captured. A graph reads
learning rates on the device, where they change from step to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import gated_layers, moe_layers
from experts.moe.token_dropout import token_dropouts
from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Emit
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.device.batches import tensors_of
from orchestrator.train.device.precision import Precision
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.optimizer import ScheduledOptimizer, has_fp64
from orchestrator.train.step.totals import PackedTotals, Totals
from orchestrator.train.step_graph.layout import copy_tensors, layout_of_step, map_tensors
from orchestrator.train.step_graph.python_state import PythonState, find_hook, host_generator_states
from orchestrator.train.step_graph.recorder import CaptureFailed, Recorder
from orchestrator.train.strategies.base import Strategy

WARM_UP_STEPS = 3
"""Ordinary steps of a layout before the one that is warmed up on the stream of the capture."""
MAX_GRAPHS = 4
_SETTLING_STEPS = 2  # the first steps may fill caches
_MAX_LAYOUTS = 64  # that are counted: batches with texts or numbers of samples have another in each step

Compute = Callable[[StepBatch], Totals]
"""Does a whole step: forward, backward, reduction and update."""
_OPTIMIZERS = (AdamW, torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


@dataclass(frozen=True)
class _Graph:
    """A captured step, and the tensors that it reads its batches from."""

    inputs: list[Tensor]
    repeat: Callable[[], PackedTotals]


class StepGraphs:
    """The graphs of a run, by the layout of their batches."""

    def __init__(
        self,
        recorder: Recorder,
        strategy: Strategy,
        optimizer: ScheduledOptimizer,
        device: torch.device,
        emit: Emit,
        required: bool = False,
    ) -> None:
        """``required`` if the user asked for graphs: an obstacle that is known before the capture is an error
        then."""
        self.is_on = True
        self._recorder = recorder
        self._optimizer = optimizer
        self._device = device
        self._emit = emit
        self._required = required
        self._state = PythonState(strategy.task, strategy.model, optimizer.inner)
        self._rates = DeviceRates(optimizer, device)
        self._num_seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no graph that holds memory."""
        return not self._graphs

    def run(
        self, batch: StepBatch, data: Sequence[Any], step: int, max_pass_samples: int, compute: Compute
    ) -> Totals | None:
        """Do a step with a graph, if there is one for its layout; return None if there is none.

        ``data`` are the batches of the micro-batches. A step of the warm-up, and the capture, call
        ``compute``."""
        layout = layout_of_step(batch, data, max_pass_samples)
        if layout is None:
            return None
        graph = self._graphs.get(layout) or self._approach(layout, batch, data, step, compute)
        if not isinstance(graph, _Graph):
            return graph
        if not self._is_unchanged():
            return None
        self._optimizer.set_rates(step)
        self._rates.fill()
        copy_tensors(graph.inputs, list(tensors_of(data)))
        return graph.repeat().copied()

    def drop(self) -> None:
        """Drop all graphs, as the tensors that they read were replaced. New ones follow after a warm-up."""
        self._num_seen.clear()
        self._state.take()
        if self._graphs:
            self._graphs.clear()
            self._recorder.forget()

    def stop(self, reason: str, failed: bool = False) -> None:
        """Use no graphs any more."""
        self.is_on = False
        self.drop()
        self._emit(kinds.CudaGraph(status="failed" if failed else "off", seconds=0.0, detail=reason))

    def _approach(
        self, layout: Hashable, batch: StepBatch, data: Sequence[Any], step: int, compute: Compute
    ) -> _Graph | Totals | None:
        """Return a new graph for a layout that came often enough, or the totals of its last warm-up."""
        num_seen = self._num_seen[layout]
        self._num_seen[layout] += 1
        if len(self._num_seen) > _MAX_LAYOUTS and not self._graphs:
            self._refuse("the sizes or values of its batches change from step to step")
            return None
        if len(self._num_seen) > _MAX_LAYOUTS:
            self._num_seen = Counter({layout: num_seen + 1})
        if num_seen < _SETTLING_STEPS and not self._graphs:
            self._state.take()
        elif not self._is_unchanged():
            return None
        if num_seen < WARM_UP_STEPS or len(self._graphs) == MAX_GRAPHS:
            return None
        if num_seen == WARM_UP_STEPS:
            return self._warm_up(with_data(batch, data), compute)
        return self._capture(layout, batch, data, step, compute)

    def _warm_up(self, batch: StepBatch, compute: Compute) -> Totals:
        before = host_generator_states(self._device)
        totals = self._recorder.warm_up(lambda: compute(batch))
        if host_generator_states(self._device) != before:
            self._refuse("the loss draws random numbers on the host")
        return totals

    def _capture(
        self, layout: Hashable, batch: StepBatch, data: Sequence[Any], step: int, compute: Compute
    ) -> _Graph | None:
        began_s = perf_counter()
        inputs = [map_tensors(each, torch.clone) for each in data]
        static = with_data(batch, inputs)

        def compute_static() -> PackedTotals:
            with self._rates.in_use():
                return PackedTotals.of(compute(static))

        try:
            repeat = self._recorder.record(compute_static)
        except CaptureFailed as error:
            self.stop(str(error), failed=True)
            return None
        graph = _Graph(list(tensors_of(inputs)), repeat)
        self._graphs[layout] = graph
        detail = f"steps of {batch.global_samples} samples, from step {step + 1} on"
        self._emit(kinds.CudaGraph(status="captured", seconds=perf_counter() - began_s, detail=detail))
        return graph

    def _is_unchanged(self) -> bool:
        """Return whether Python still has the values of the capture; otherwise stop."""
        change = self._state.change()
        if change is None:
            return True
        if self._graphs:
            self.stop(f"{change} changed after the capture")
        else:
            self._refuse(f"{change} changes from step to step")
        return False

    def _refuse(self, reason: str) -> None:
        if self._required:
            raise UserError(f"--cuda-graph on cannot work: {reason}; a graph would repeat the first values")
        self.stop(reason)


def with_data(batch: StepBatch, data: Sequence[Any]) -> StepBatch:
    """Return a step whose micro-batches were fetched already."""
    micro_batches = [
        replace(micro_batch, fetch=partial(_identity, each))
        for micro_batch, each in zip(batch.micro_batches, data, strict=True)
    ]
    return replace(batch, micro_batches=micro_batches)


def _identity(data: Any) -> Any:
    return data


class DeviceRates:
    """A tensor for the learning rate of each group; groups with one rate share it."""

    def __init__(self, optimizer: ScheduledOptimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        peaks = optimizer.peak_rates
        by_peak = {peak: torch.zeros((), device=device) for peak in peaks}
        self._of_group = [by_peak[peak] for peak in peaks]
        self._filled: list[float] = []

    def fill(self) -> None:
        """Take over the rates that the groups have now."""
        rates = [float(group["lr"]) for group in self._optimizer.inner.param_groups]
        if rates != self._filled:
            for tensor, rate in dict(zip(self._of_group, rates, strict=True)).items():
                tensor.fill_(rate)
            self._filled = rates

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the optimizer read the tensors in place of numbers: in the capture of a graph."""
        groups: list[dict[str, Any]] = self._optimizer.inner.param_groups
        names = ("lr", "capturable")
        before = [{name: group[name] for name in names if name in group} for group in groups]
        self._optimizer.keeps_rates = True
        try:
            for group, tensor in zip(groups, self._of_group, strict=True):
                group["lr"] = tensor
                if "capturable" in group:
                    group["capturable"] = True
            yield
        finally:
            self._optimizer.keeps_rates = False
            for group, values in zip(groups, before, strict=True):
                group.update(values)


# --- obstacles to the capture that are known before the first step


def find_obstacle(
    strategy: Strategy, optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device
) -> str | None:
    """Return why the steps of this model cannot be captured; None if there is no known obstacle."""
    if hasattr(strategy.task, "prepare_step"):
        return "the task looks at each step before it is trained (prepare_step)"
    hook = find_hook(strategy.model)
    if hook is not None:
        return f"{hook} has a hook, which a graph would not call"
    return _optimizer_obstacle(optimizer) or _experts_obstacle(strategy.model, precision, device)


def _optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    handle: Any = optimizer
    name = type(optimizer).__name__
    if type(optimizer) not in _OPTIMIZERS or not all(group.get("fused") for group in optimizer.param_groups):
        return f"{name} does not run in one kernel: only fused AdamW, Adam and SGD can be captured"
    if handle._optimizer_step_pre_hooks or handle._optimizer_step_post_hooks:
        return f"{name} has a hook, which a graph would not call"
    if has_fp64(p for group in optimizer.param_groups for p in group["params"]):
        return "the weights are in fp64, and a graph reads the learning rate in fp32"
    return None


def _experts_obstacle(model: nn.Module, precision: Precision, device: torch.device) -> str | None:
    for name, _ in token_dropouts(model):
        return f"the dropout {name} depends on the step"
    for name, layer in gated_layers(model):
        if layer.jitter:
            return f"the noise of the gate {name} depends on the step"
        if layer.statistics is not None or layer.twin_E is not None:
            return f"the experts of {name} may change in training"
    for name, layer in moe_layers(model):
        if layer.capacity is not None:
            return f"the host counts the rows that a capacity leaves to {name}"
        dtype = precision.dtype or next(layer.bank.parameters()).dtype
        if layer.bank.waits_for_counts(device, dtype):
            return f"the host counts the rows of the experts of {name}: of several sizes, or in a loop"
    return None
