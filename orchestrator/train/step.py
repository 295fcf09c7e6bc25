"""One optimizer step: forward and backward over its micro-batches, a reduction over the workers, one
update.

A step that runs out of memory is repeated with smaller passes (``step_recovery``): with the same samples,
the same randomness and the same global batch.
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

from experts.balance import moe_layers, update_balance
from experts.model import mix
from orchestrator.errors import OutOfMemory, ResourceError, UserError
from orchestrator.record.log import Emit
from orchestrator.tasks.task import Loss
from orchestrator.tasks.validate import as_loss, check_trainable
from orchestrator.train.batches import check_batch_device
from orchestrator.train.data import MicroBatch, StepBatch, different_ends
from orchestrator.train.heartbeat import Heartbeat
from orchestrator.train.parts.clock import PhaseClock
from orchestrator.train.parts.compiling import Compiled
from orchestrator.train.parts.memory import free_cached, is_out_of_memory
from orchestrator.train.parts.memory_parts import StateMemory, state_parts
from orchestrator.train.parts.optim import ScheduledOptimizer, clip_factor
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.weight_copies import WeightCopies
from orchestrator.train.parts.world import World
from orchestrator.train.requests import NO_VOTES, Votes
from orchestrator.train.step_graph.graphs import StepGraphs, with_data
from orchestrator.train.step_preview import Preview, is_single_pass, split_passes
from orchestrator.train.step_recovery import Problem, StepRecovery
from orchestrator.train.step_statistics import StepStatistics
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.totals import Totals, TotalsReducer


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
    _reduce_totals: TotalsReducer = field(init=False)
    _num_moe_layers: int = field(init=False)
    _statistics: StepStatistics = field(init=False)
    _compile_reported: bool = field(init=False, default=False)
    _constants: dict[tuple[float, torch.dtype], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._recovery = StepRecovery(self.world, self.strategy, self.micro_batch, self.emit)
        self._reduce_totals = TotalsReducer(self.world, "step", self.strategy.num_expert_grads)
        self.strategy.set_trained(self.optimizer.parameters)
        self._num_moe_layers = len(moe_layers(self.strategy.model))
        self._statistics = StepStatistics(self.strategy.model, self.strategy.context)

    @property
    def max_pass_samples(self) -> int:
        """Most samples of one forward and backward pass."""
        return self._recovery.max_pass_samples

    def experts_changed(self) -> None:
        """Take over parameters that were replaced, and another number of experts."""
        self._statistics = StepStatistics(self.strategy.model, self.strategy.context)
        self.optimizer.parameters_changed()
        self.state_memory.experts_changed()
        if self.copies is not None:
            self.copies.update()
        self.strategy.experts_changed()
        self.strategy.set_trained(self.optimizer.parameters)
        self._reduce_totals.experts_changed(self.strategy.num_expert_grads)
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
                global_totals = self._reduce(totals, batch, votes)
                if self.strategy.rows_fit():
                    break
                self._repeat_with_counts(step)
                continue
            # Outside the handler, so that no frame of the failed attempt keeps its tensors alive.
            self._prepare_repetition(problem, step)
        self._update(global_totals, step)
        self.clock.mark("optimizer")
        self._recovery.grow_back(step)
        self._report_compilation(perf_counter() - attempt_start)
        return global_totals

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
            if not (on_gpu and torch.cuda.is_current_stream_capturing()):
                self._statistics.save()  # a replay cannot fail half-way
            self._begin(batch)
            totals = self._run_passes(batch, self._noise_seed(step))
            totals = self._reduce(totals, batch, NO_VOTES)
            self._update(totals, step)
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
        noise_seed = self._noise_seed(step)
        self._preview(batch, step, noise_seed)
        return self._run_passes(batch, noise_seed)

    def _begin(self, batch: StepBatch) -> None:
        self.optimizer.inner.zero_grad(set_to_none=True)
        if self.copies is not None:
            self.copies.begin_step(is_single_pass(batch, self.max_pass_samples))
        self.strategy.begin_step(batch.all_have_samples)

    def _noise_seed(self, step: int) -> int:
        """Return the seed of the gates' noise in a step.

        Equal on all hosts: the noise depends on a token's position in the global batch alone."""
        return mix(self.seed, "noise", step) >> 20

    def _run_passes(self, batch: StepBatch, noise_seed: int) -> Totals | None:
        nominal_count = self._nominal_count(batch)
        totals: Totals | None = None
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            is_last = number == len(batch.micro_batches)
            # A worker whose samples were all left out takes part where all others do. It also has totals: of
            # a step without a good sample on any worker, the zeros have their names.
            left_out = batch.all_have_samples or (is_last and totals is None and batch.faults)
            if micro_batch.num_samples or self.strategy.lockstep or left_out:
                totals = self._run_micro_batch(micro_batch, totals, is_last, noise_seed, nominal_count)
        return totals

    def _preview(self, batch: StepBatch, step: int, noise_seed: int) -> None:
        """Let the task see the whole step, if it asks for it."""
        prepare = getattr(self.strategy.task, "prepare_step", None)
        if prepare is None:
            return
        prepare(Preview(batch, self.strategy, self.world, self.precision, self.max_pass_samples, noise_seed))
        # A forward pass of the preview and that of the training draw the same random numbers.
        self._seed_torch(step)

    def _seed_torch(self, step: int) -> None:
        seed_torch(mix(self.seed, "step", step, self.world.rank), self.world.device)

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
        with self.strategy.dummy_pass() if dummy else nullcontext():
            for each in split_passes(micro_batch, data, self.max_pass_samples, noise_seed):
                with self.strategy.context.use_step(each.context):
                    loss, weight = self._forward(each.batch, each.size, last=is_last and each.is_last)
                    self.clock.mark("forward")
                    factor = 0.0 if dummy else weight / nominal_count
                    loss.sum.backward(self._gradient_seed(loss.sum, factor))
                    self.clock.mark("backward")
                more = Totals.from_loss(loss, weight, each.size, copy=self.compiled is not None)
                # Zeros, so that a step without a single good sample has totals too.
                more = more.zeroed() if dummy else more
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
                f"{self._num_moe_layers}: balancing would be blind. Return Loss(sum, count, metrics, loads) "
                "with routing.counts_E of each layer, in the order of the model"
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

    # --- reduction and update

    def _reduce(self, totals: Totals | None, batch: StepBatch, votes: Votes) -> Totals:
        """Sum gradients and totals over all workers."""
        if self.world.size == 1:
            assert totals is not None
            totals.samples = batch.global_samples
            totals.nominal_count = self._nominal_count(batch)
            has_samples = any(micro_batch.num_samples for micro_batch in batch.micro_batches)
            if isinstance(totals.count, int) and totals.count < 1 and has_samples:
                raise UserError(f"the task's loss counts {totals.count} in a step; a mean needs at least 1")
            return totals
        try:
            factor = self.strategy.all_reduce_gradients()
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(
                    f"worker {self.world.rank} ran out of memory in the sum of gradients",
                    self._recovery.pass_samples,
                ) from None
            raise
        global_totals = self._reduce_totals(
            totals,
            batch.global_samples,
            (*votes, float(batch.next_samples or 0)),
            self.strategy.expert_grad_squares(),
            self.strategy.exchange_stats(),
        )
        assert global_totals.votes is not None
        self._check_next(batch, global_totals.votes[-1])
        global_totals.votes = global_totals.votes[:-1]
        global_totals.nominal_count = self._nominal_count(batch) * factor
        self.clock.mark("communication")
        return global_totals

    def _check_next(self, batch: StepBatch, total: Tensor) -> None:
        """Refuse data that ends on some workers only. ``total`` sums the samples of all next batches.

        Workers whose data goes on would wait for the others in the next step."""
        samples = batch.next_samples
        if samples is None:
            return
        # On a GPU reading the sum waits for the device: only a worker near its end does.
        may_end = samples < batch.global_samples
        if (may_end or self.world.device.type == "cpu") and float(total) != samples * self.world.size:
            found = f"the next step has {samples} samples" if samples else "the epoch ends"
            raise different_ends(self.world.rank, found)

    def _update(self, totals: Totals, step: int) -> None:
        """Update weights and balance. It cannot be repeated: part of it may have happened when it fails."""
        try:
            self._divide_clip_and_step(totals, step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ResourceError(
                f"out of memory in the optimizer at step {step + 1}: its state does not fit next to the "
                "model; try a smaller model, or a device with more memory"
            ) from None
        if totals.loads:
            update_balance(self.strategy.model, totals.loads)
        self.state_memory.after_update(self.memory_parts)

    def _divide_clip_and_step(self, totals: Totals, step: int) -> None:
        """Divide gradients by the count of the global batch, clip them, and update the weights."""
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        gradients = self.strategy.local_parts(gradients)
        count = totals.count
        count = count.double().clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        factor: float | Tensor = totals.nominal_count / count
        if self.precision.scale is not None:
            factor = factor / self.precision.scale.double()
        norm = self.strategy.gradient_norm(gradients, totals.expert_grad_squares)
        totals.norm, factor = clip_factor(norm, factor, self.clip_norm)
        self.optimizer.scale_gradients(gradients, factor)
        if self.precision.scale is not None:
            # The norm covers the gradients of all workers, so all of them find the same overflows.
            totals.finite = totals.norm.isfinite()
        self.optimizer.step(step, totals.finite)
        if totals.finite is not None:
            self.precision.update(totals.finite)

    # --- failed attempts

    def _prepare_repetition(self, problem: Problem, step: int) -> None:
        """Undo a failed attempt, and remove its cause."""
        self._statistics.restore()
        self.optimizer.inner.zero_grad(set_to_none=True)
        free_cached(self.world.device)
        if self.graphs is not None and not self.graphs.is_empty:
            # Their memory may be what is missing.
            self.graphs.stop(f"step {step + 1} failed beside the graphs ({problem}); it is repeated without")
            return
        if problem == "uncompile":
            assert self.compiled is not None
            self.compiled.undo()
            self.compiled = None
        else:
            self._recovery.shrink_passes(problem, step)

    def _repeat_with_counts(self, step: int) -> None:
        """Undo an attempt in which some tokens did not reach their experts."""
        self._statistics.restore()
        self.optimizer.inner.zero_grad(set_to_none=True)
        self.emit(
            "warning",
            kind="exchange",
            message=f"step {step + 1}: more rows than their bound (--exchange-rows); the step is repeated",
        )

    def _report_compilation(self, seconds: float) -> None:
        """Emit an event after the first step, which compiled the model."""
        if self.compiled is not None and not self._compile_reported:
            self.emit(
                "compile",
                status="compiled",
                seconds=seconds,
                detail=f"{len(self.compiled.modules)} modules, in the first step",
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
