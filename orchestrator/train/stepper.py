"""One optimizer step: forward and backward over its micro-batches, a reduction over the workers, one
update.

A step that runs out of memory is repeated with smaller passes (``step/out_of_memory``): with the same
samples, the same randomness and the same global batch.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experts.balance import moe_layers
from experts.model import mix
from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Emit
from orchestrator.tasks.task import Loss
from orchestrator.tasks.validate import as_loss, check_trainable
from orchestrator.train.data.steps import MicroBatch, StepBatch
from orchestrator.train.device.batches import check_batch_device
from orchestrator.train.device.clock import PhaseClock
from orchestrator.train.device.compiling import Compiled
from orchestrator.train.device.memory import free_cached
from orchestrator.train.device.memory_parts import StateMemory, state_parts
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.requests import NO_VOTES, Votes
from orchestrator.train.group.world import World
from orchestrator.train.optim.optimizer import ScheduledOptimizer
from orchestrator.train.optim.weight_copies import WeightCopies
from orchestrator.train.step.out_of_memory import Problem, StepRecovery
from orchestrator.train.step.preview import Preview, is_single_pass, split_passes
from orchestrator.train.step.totals import Totals
from orchestrator.train.step.update import StepReduction, WeightUpdate
from orchestrator.train.step_graph.graphs import StepGraphs, with_data
from orchestrator.train.strategies.base import MORE_ROWS, Strategy
from orchestrator.train.strategies.buffers import StepStatistics


@dataclass
class Stepper:
    """Runs optimizer steps with one model, optimizer and strategy."""

    world: World
    strategy: Strategy
    optimizer: ScheduledOptimizer
    precision: Precision
    micro_batch: int
    seed: int
    clip_norm: float
    clock: PhaseClock
    emit: Emit
    compiled: Compiled | None = None
    copies: WeightCopies | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    graphs: StepGraphs | None = None
    """Where steps are shorter than the Python around them."""
    state_memory: StateMemory = field(init=False, default_factory=StateMemory)
    _recovery: StepRecovery = field(init=False)
    _reduction: StepReduction = field(init=False)
    _num_moe_layers: int = field(init=False)
    _statistics: StepStatistics = field(init=False)
    _compile_reported: bool = field(init=False, default=False)
    _constants: dict[tuple[float, torch.dtype], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._recovery = StepRecovery(self.world, self.strategy, self.micro_batch, self.emit)
        self._reduction = StepReduction(self.world, self.strategy, self._recovery)
        self.strategy.set_trained(self.optimizer.parameters)
        self._num_moe_layers = len(moe_layers(self.strategy.model))
        self._statistics = StepStatistics(self.strategy.model, self.strategy.context)

    @property
    def max_pass_samples(self) -> int:
        """Most samples of one forward and backward pass."""
        return self._recovery.max_pass_samples

    @property
    def _update(self) -> WeightUpdate:
        return WeightUpdate(self.strategy, self.optimizer, self.precision, self.clip_norm)

    def experts_changed(self) -> None:
        """Take over parameters that were replaced, and another number of experts."""
        self._statistics = StepStatistics(self.strategy.model, self.strategy.context)
        self.optimizer.parameters_changed()
        self.state_memory.experts_changed()
        if self.copies is not None:
            self.copies.update()
        self.strategy.experts_changed()
        self.strategy.set_trained(self.optimizer.parameters)
        self._reduction.experts_changed()
        if self.compiled is not None:
            self.compiled.experts_changed(self.strategy.model)
        if self.graphs is not None:
            self.graphs.drop()

    def run(self, batch: StepBatch, step: int, votes: Votes = NO_VOTES) -> Totals:
        """Run step number ``step`` (from 0); return its sums over all workers and the norm of its gradient.

        ``votes`` are this worker's requests; the sums carry them to the others.
        """
        while True:
            problem: Problem | None = None
            totals: Totals | None = None
            attempt_start = perf_counter()
            try:
                if self.graphs is not None and self.graphs.is_on:
                    data = self._fetch(batch)
                    replayed = self._replay(self.graphs, batch, data, step)
                    if replayed is not None:
                        return replayed
                    batch = with_data(batch, data)
                totals = self._attempt(batch, step)
            except Exception as error:
                problem = self._recovery.classify(error, step, self.compiled is not None)
                if problem is None:
                    raise
            if self.strategy.needs_vote:
                problem = self._recovery.vote(problem)
            if problem is None:
                global_totals = self._reduction.reduce(totals, batch, votes, self._nominal_count(batch))
                reason = self.strategy.why_repeat(global_totals.expert_grad_squares)
                if self.world.size > 1:
                    self.clock.mark("communication")
                if reason is None:
                    break
                self._undo(reason, step)
                continue
            # Outside the handler, so that no frame of the failed attempt keeps its tensors alive.
            self._prepare_repetition(problem, step)
        self._apply(global_totals, step)
        self.clock.mark("optimizer")
        self._recovery.grow_back(step)
        self._report_compilation(perf_counter() - attempt_start)
        return global_totals

    def _apply(self, totals: Totals, step: int) -> None:
        """Update the weights. A skipped step leaves the statistics as they were before its passes."""
        self._update.apply(totals, step)
        if totals.finite is not None:
            self._statistics.restore(totals.finite)
        self.state_memory.after_update(self.memory_parts)

    def memory_parts(self) -> dict[str, int]:
        """Return the bytes of the state that exists now on this worker's device, by part."""
        copies = self.copies.tensors if self.copies is not None else []
        return state_parts(self.strategy.model, self.optimizer.inner, copies, self.world.device)

    # --- steps of a graph

    def _fetch(self, batch: StepBatch) -> list[Any]:
        """Bring the data of all micro-batches to the device."""
        with self.heartbeat.within("data"):
            data = [micro_batch.fetch() for micro_batch in batch.micro_batches]
        self.clock.mark("data")
        return data

    def _replay(self, graphs: StepGraphs, batch: StepBatch, data: list[Any], step: int) -> Totals | None:
        """Do the step with a graph; return None if there is none for it."""
        self._statistics.forget()
        if self.copies is not None:
            self.copies.refresh()  # an evaluation may have written other weights meanwhile
        # Before the replay: a graph reads the seed when it starts.
        self._seed_torch(step)
        totals = graphs.run(batch, data, step, self.max_pass_samples, partial(self._compute_whole, step=step))
        if totals is not None:
            self.clock.mark("graph")
            self._recovery.grow_back(step)
        return totals

    def _compute_whole(self, batch: StepBatch, step: int) -> Totals:
        """Do a whole step in one process, for a graph: it is a single phase of the clock."""
        clock = self.clock
        self.clock = PhaseClock()
        try:
            on_gpu = self.world.device.type == "cuda"
            # A replay cannot fail half-way, but a step in fp16 may be skipped.
            if self.precision.scale is not None or not (on_gpu and torch.cuda.is_current_stream_capturing()):
                self._statistics.save()
            self._begin(batch)
            totals = self._run_passes(batch, step)
            totals = self._reduction.reduce(totals, batch, NO_VOTES, self._nominal_count(batch))
            self._apply(totals, step)
            return totals
        finally:
            self.clock = clock

    # --- forward and backward

    def _attempt(self, batch: StepBatch, step: int) -> Totals | None:
        """Run forward and backward over all micro-batches; return None if this worker has no samples.

        Until it returns, every change can be undone, so that the step can be repeated.
        """
        self._statistics.save()
        self._seed_torch(step)
        self._begin(batch)
        self._preview(batch, step)
        return self._run_passes(batch, step)

    def _begin(self, batch: StepBatch) -> None:
        self.optimizer.inner.zero_grad(set_to_none=True)
        if self.copies is not None:
            self.copies.begin_step(is_single_pass(batch, self.max_pass_samples))
        self.strategy.begin_step(batch.all_have_samples)

    def _noise_seed(self, step: int) -> int:
        """Return the seed of the gates' noise in a step.

        Equal on all hosts: the noise depends on a token's position in the global batch alone."""
        return mix(self.seed, "noise", step) >> 20

    def _run_passes(self, batch: StepBatch, step: int) -> Totals | None:
        nominal_count = self._nominal_count(batch)
        noise_seed = self._noise_seed(step)
        totals: Totals | None = None
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            is_last = number == len(batch.micro_batches)
            # A worker whose samples were all bad computes dummy samples where all others compute theirs. Its
            # totals are zeros under the names of the metrics: a step without a good sample on any worker
            # needs these names too.
            left_out = batch.all_have_samples or (is_last and totals is None and batch.faults)
            if micro_batch.num_samples or self.strategy.lockstep or left_out:
                self._seed_micro_batch(step, micro_batch.number)
                totals = self._run_micro_batch(micro_batch, totals, is_last, noise_seed, nominal_count)
        return totals

    def _preview(self, batch: StepBatch, step: int) -> None:
        """Let the task see the whole step, if it asks for it."""
        prepare = getattr(self.strategy.task, "prepare_step", None)
        if prepare is None:
            return
        noise_seed = self._noise_seed(step)
        limit = self.max_pass_samples
        seed = partial(self._seed_micro_batch, step)
        prepare(Preview(batch, self.strategy, self.world, self.precision, limit, noise_seed, seed))
        # A forward pass of the preview and that of the training draw the same random numbers.
        self._seed_torch(step)

    def _seed_torch(self, step: int) -> None:
        rank = 0 if self.strategy.reproducible else self.world.rank
        seed_torch(mix(self.seed, "step", step, rank), self.world.device)

    def _seed_micro_batch(self, step: int, number: int) -> None:
        """Seed the draws of a micro-batch by its number, whichever worker computes it."""
        if self.strategy.reproducible:
            seed_torch(mix(self.seed, "step", step, "micro-batch", number), self.world.device)

    def _run_micro_batch(
        self,
        micro_batch: MicroBatch,
        totals: Totals | None,
        is_last: bool,
        noise_seed: int,
        nominal_count: float,
    ) -> Totals | None:
        """Compute a micro-batch in passes of at most ``max_pass_samples``; return ``totals`` plus its sums.

        A dummy micro-batch is computed too, but adds nothing.
        """
        with self.heartbeat.within("data"):
            data = micro_batch.fetch()
        self.clock.mark("data")
        dummy = not micro_batch.num_samples
        with self.precision.weights(), self.strategy.dummy_pass() if dummy else nullcontext():
            for each in split_passes(micro_batch, data, self.max_pass_samples, noise_seed):
                with self.strategy.context.use_step(each.context):
                    loss, weight = self._forward(each.batch, each.size, last=is_last and each.is_last)
                    self.clock.mark("forward")
                    factor = 0.0 if dummy else weight / nominal_count
                    loss.sum.backward(self._gradient_seed(loss.sum, factor))
                    self.clock.mark("backward")
                more = Totals.from_loss(loss, weight, each.size, copy=self.compiled is not None)
                # Zeros, so that a step without a good sample has totals too.
                more = more.zeroed() if dummy else more
                if self.strategy.reproducible and not dummy:
                    more = more.numbered(micro_batch.number)
                totals = more if totals is None else totals.plus(more)
        return totals

    def _forward(self, batch: Any, samples: int, last: bool) -> tuple[Loss, float]:
        check_batch_device(batch, self.world.device)
        with self.precision.autocast():
            loss, weight = as_loss(self.strategy.loss(batch, last), samples)
        check_trainable(loss)
        if len(loss.loads) != self._num_moe_layers:
            raise UserError(
                f"the task's loss counts the loads of {len(loss.loads)} MoE layers, and the model has "
                f"{self._num_moe_layers}: their experts could not be balanced. Return Loss(sum, count, "
                "metrics, loads) with routing.counts_E of each layer, in the order of the model"
            )
        return loss, weight

    def _gradient_seed(self, loss: Tensor, factor: float) -> Tensor:
        """Return the gradient that the backward pass begins with: a constant on the device, made once.

        So dividing the loss costs no operation, and no copy from the host.
        """
        key = (factor, loss.dtype)
        if key not in self._constants:
            self._constants[key] = torch.full((), factor, dtype=loss.dtype, device=loss.device)
        return self.precision.scaled(self._constants[key])

    def _nominal_count(self, batch: StepBatch) -> float:
        return power_of_two(batch.global_samples * getattr(self.strategy.task, "units_per_sample", 1))

    # --- failed attempts

    def _prepare_repetition(self, problem: Problem, step: int) -> None:
        """Undo a failed attempt, and remove its cause."""
        self._statistics.restore()
        self.optimizer.inner.zero_grad(set_to_none=True)
        free_cached(self.world.device)
        if self.graphs is not None and not self.graphs.is_empty:
            # The graphs may hold the memory that the step lacks.
            self.graphs.stop(f"step {step + 1} failed beside the graphs ({problem}); it is repeated without")
            return
        if problem == "uncompile":
            assert self.compiled is not None
            self.compiled.undo()
            self.compiled = None
        else:
            self._recovery.shrink_passes(problem, step)

    def _undo(self, reason: str, step: int) -> None:
        """Undo an attempt that the strategy wants repeated."""
        self._statistics.restore()
        self.optimizer.inner.zero_grad(set_to_none=True)
        # The first step has no norm before it to choose the grid of exact sums by.
        if step or not self.strategy.reproducible:
            message = f"step {step + 1}: {reason}; the step is repeated"
            kind = "exchange" if reason == MORE_ROWS else "gradients"
            self.emit(kinds.Warned(kind=kind, message=message))

    def _report_compilation(self, seconds: float) -> None:
        """Emit an event after the first step, which compiled the model."""
        if self.compiled is not None and not self._compile_reported:
            self.emit(
                kinds.Compile(
                    status="compiled",
                    seconds=seconds,
                    detail=f"{len(self.compiled.modules)} modules, in the first step",
                )
            )
        self._compile_reported = True


def power_of_two(value: float) -> float:
    """Return the power of two nearest to a number, at least 1.

    Gradients are divided by it during the step, which keeps them near their mean and rounds nothing, and by
    the exact count at its end.
    """
    return 2.0 ** round(math.log2(max(1.0, value)))


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators that the model draws from.

    Randomness depends on seed and step alone: there is no state to save, and a repeated step draws the
    same.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
