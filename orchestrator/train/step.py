"""One optimizer step: forward and backward over its micro-batches, then one update. A step that runs out of memory is
done again in halves, with the same samples, the same randomness and the same global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers, update_balance
from experts.context import StepContext
from experts.model import mix
from orchestrator.errors import OrchestratorError, OutOfMemory, ResourceError, UserError
from orchestrator.tasks.load import raised_in_user_code, user_code
from orchestrator.tasks.task import Loss, Task
from orchestrator.train.data import StepBatch, slice_batch, tensors_of
from orchestrator.train.parts.clock import PhaseClock
from orchestrator.train.parts.comm_errors import is_communication_error
from orchestrator.train.parts.compiling import Compiled, is_compile_error
from orchestrator.train.parts.memory import free_cached, is_out_of_memory
from orchestrator.train.parts.optim import ScheduledOptimizer, scale_and_clip
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buffers import running_statistics
from orchestrator.train.totals import Totals, TotalsReducer

Emit = Callable[..., None]

_PROBLEMS = (None, "uncompile", "halve", "exhausted")  # from bad to worse
NO_LIMIT = (
    2**62
)  # a limit that cuts nothing: where workers wait for each other in a forward pass, all do as many
GROW_AFTER = 100  # good steps before a micro-batch that was halved is doubled again; the wait doubles with each failure


@dataclass
class Stepper:
    """Everything a step needs, put together once."""

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
    max_pass_samples: int = field(init=False)
    _sums: TotalsReducer = field(init=False)
    _routed: int = field(init=False)
    _statistics: list[tuple[Tensor, Tensor]] = field(init=False)
    _good: int = field(init=False, default=0)
    _patience: int = field(init=False, default=GROW_AFTER)
    _compiled_told: bool = field(init=False, default=False)
    _constants: dict[tuple[float, torch.dtype], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.max_pass_samples = NO_LIMIT if self.strategy.lockstep else self.micro_batch
        self._sums = TotalsReducer(self.world, "step", self.strategy.num_expert_grads)
        self.strategy.set_trained(self.optimizer.parameters)
        self._routed = len(moe_layers(self.strategy.model))
        self._statistics = [(b.detach().clone(), b) for b in running_statistics(self.strategy.model)]

    def run(self, portion: StepBatch, step: int, stop: bool = False) -> Totals:
        """Do step number ``step`` (from 0): returns its sums over all workers, with the norm of its gradient. ``stop`` is
        this worker's wish, which the sums carry to the others."""
        while True:
            problem, totals = None, None
            begun = perf_counter()
            try:
                totals = self._attempt(portion, step)
            except Exception as error:
                problem = self._recoverable(error, step)
                if problem is None:
                    raise
            if self.strategy.needs_vote:
                problem = self._vote(problem)
            if problem is None:
                break
            # outside the handler, so that no frame of the failed attempt holds on to its tensors
            self._recover(problem, step)
        whole = self._together(totals, portion, stop)
        self._update(whole, step)
        self.clock.mark("optimizer")
        self._grow_back(step)
        self._tell_compiled(perf_counter() - begun)
        return whole

    def _attempt(self, portion: StepBatch, step: int) -> Totals | None:
        """Forward and backward over all micro-batches; None where this worker has none. Until it returns, nothing has
        changed that cannot be put back."""
        self._keep_statistics()
        seed_everything(mix(self.seed, "step", step, self.world.rank), self.world.device)
        self.optimizer.inner.zero_grad(set_to_none=True)
        self.strategy.begin_step(portion.all_have_samples)
        noise_seed = mix(self.seed, "noise", step) >> 20
        nominal = self._nominal(portion)
        totals: Totals | None = None
        for number, micro in enumerate(portion.micro_batches, 1):
            if not micro.num_samples and not self.strategy.lockstep:
                continue
            batch = micro.fetch()
            self.clock.mark("data")
            samples = micro.num_samples or micro.num_dummies  # a stand-in counts for nothing, but is computed
            with nullcontext() if micro.num_samples else self.strategy.dummy_pass():
                for begin in range(0, samples, self.max_pass_samples):
                    end = min(begin + self.max_pass_samples, samples)
                    context = StepContext(
                        noise_seed, micro.first_sample + begin, end - begin, not micro.num_samples
                    )
                    part = batch if end - begin == samples else slice_batch(batch, begin, end, samples)
                    with self.strategy.context.use_step(context):
                        loss, weight = self._forward(
                            part, end - begin, last=number == len(portion.micro_batches) and end == samples
                        )
                        self.clock.mark("forward")
                        loss.sum.backward(
                            self._seed_gradient(loss.sum, weight / nominal if micro.num_samples else 0.0)
                        )
                        self.clock.mark("backward")
                    if micro.num_samples:
                        more = Totals.from_loss(loss, weight, end - begin, copy=self.compiled is not None)
                        totals = more if totals is None else totals.plus(more)
        return totals

    def _held(self) -> int:
        """Samples that are computed at once."""
        return min(self.max_pass_samples, self.micro_batch)

    def _nominal(self, portion: StepBatch) -> float:
        return power_of_two(portion.global_samples * getattr(self.strategy.task, "units_per_sample", 1))

    def _vote(self, problem: str | None) -> str | None:
        """The worst that happened to any worker, which then happens to all."""
        worst = int(self.world.all_reduce_max([float(_PROBLEMS.index(problem))])[0])
        return _PROBLEMS[worst]

    def _together(self, totals: Totals | None, portion: StepBatch, stop: bool) -> Totals:
        """Gradients and sums of all workers."""
        if self.world.size == 1:
            assert totals is not None
            totals.samples, totals.nominal_count = portion.global_samples, self._nominal(portion)
            if isinstance(totals.count, int) and totals.count < 1:
                raise UserError(f"the task's loss counts {totals.count} in a step; a mean needs at least 1")
            return totals
        try:
            factor = self.strategy.all_reduce_gradients()
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(
                    f"worker {self.world.rank} ran out of memory in the sum of gradients", self._held()
                ) from None
            raise
        whole = self._sums(
            totals,
            portion.global_samples,
            stop,
            self.strategy.expert_grad_squares(),
            self.strategy.exchange_stats(),
        )
        whole.nominal_count = self._nominal(portion) * factor
        self.clock.mark("communication")
        return whole

    def _seed_gradient(self, loss: Tensor, factor: float) -> Tensor:
        """What the backward pass begins with: a constant on the device, so that scaling the loss costs nothing."""
        key = (factor, loss.dtype)
        if key not in self._constants:
            self._constants[key] = torch.full((), factor, dtype=loss.dtype, device=loss.device)
        return self.precision.scaled(self._constants[key])

    def _forward(self, batch: Any, samples: int, last: bool) -> tuple[Loss, float]:
        check_device(batch, self.world.device)
        with self.precision.autocast():
            loss, weight = as_loss(self.strategy.loss(batch, last), samples)
        check_trainable(loss)
        if len(loss.loads) != self._routed:
            raise UserError(
                f"the task's loss counts the loads of {len(loss.loads)} MoE layers, and the model has {self._routed}: balancing would be "
                "blind. Return Loss(sum, count, metrics, loads) with routing.counts_E of each layer, in the order of the model"
            )
        return loss, weight

    def _update(self, totals: Totals, step: int) -> None:
        """Divide by the count of the global batch, clip, and step. Not to be repeated: part of it may have been done."""
        try:
            self._divide_clip_and_step(totals, step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ResourceError(
                f"out of memory in the optimizer at step {step + 1}: its state does not fit beside the model; "
                "try a smaller model, or a device with more memory"
            ) from None
        if totals.loads:
            update_balance(self.strategy.model, totals.loads)

    def _divide_clip_and_step(self, totals: Totals, step: int) -> None:
        gradients = self.strategy.local_parts(
            [p.grad for p in self.optimizer.parameters if p.grad is not None]
        )
        count = totals.count.double().clamp(min=1) if isinstance(totals.count, Tensor) else totals.count
        factor: float | Tensor = totals.nominal_count / count
        if self.precision.scale is not None:
            factor = factor / self.precision.scale.double()
        totals.norm = scale_and_clip(
            gradients,
            self.strategy.gradient_norm(gradients, totals.expert_grad_squares),
            factor,
            self.clip_norm,
        )
        if self.precision.scale is not None:
            totals.finite = totals.norm.isfinite()
        self.optimizer.step(step, totals.finite)
        if totals.finite is not None:
            self.precision.update(totals.finite)

    def _keep_statistics(self) -> None:
        """Running statistics change in the forward pass: a copy, in case it is to be repeated."""
        for kept, running in self._statistics:
            kept.copy_(running)

    def _put_statistics_back(self) -> None:
        for kept, running in self._statistics:
            running.copy_(kept)

    def _recoverable(self, error: Exception, step: int) -> str | None:
        """What can be done about an error: 'halve', 'uncompile', or nothing. The user's errors are told as such; ours keep
        their traceback."""
        if is_out_of_memory(error):
            if self.world.size > 1 and not self.strategy.needs_vote:
                raise OutOfMemory(
                    f"worker {self.world.rank} ran out of memory at step {step + 1} with a micro-batch of {self._held()}",
                    self._held(),
                ) from None
            return "exhausted" if self.max_pass_samples == 1 else "halve"
        if (
            self.compiled is not None
            and is_compile_error(error)
            and (self.world.size == 1 or self.strategy.needs_vote)
        ):
            self.emit("compile", status="failed", seconds=0.0, detail=_first_line(error))
            return "uncompile"
        if self.world.size > 1 and is_communication_error(error):
            return None
        if not isinstance(error, OrchestratorError) and raised_in_user_code(error):
            with user_code(f"computing step {step + 1}"):
                raise error
        return None

    def _recover(self, problem: str, step: int) -> None:
        self._put_statistics_back()
        self.optimizer.inner.zero_grad(set_to_none=True)
        free_cached(self.world.device)
        if problem == "uncompile":
            assert self.compiled is not None
            self.compiled.undo()
            self.compiled = None
            return
        if problem == "exhausted":
            raise ResourceError(
                f"out of memory at step {step + 1} with a micro-batch of one sample; try --activation-checkpointing on, "
                "--precision bf16, a smaller --width, or a device with more memory"
            )
        self.strategy.micro_batch_changed()
        before, self.max_pass_samples = self.max_pass_samples, -(-self.max_pass_samples // 2)
        self._good, self._patience = 0, self._patience * 2
        self.emit(
            "oom",
            step=step + 1,
            micro_batch=before,
            next_micro_batch=self.max_pass_samples,
            where=str(self.world.device),
        )

    def _tell_compiled(self, seconds: float) -> None:
        """Once: the first step is the one that compiled."""
        if self.compiled is not None and not self._compiled_told:
            self.emit(
                "compile",
                status="compiled",
                seconds=seconds,
                detail=f"{len(self.compiled.modules)} modules, in the first step",
            )
        self._compiled_told = True

    def _grow_back(self, step: int) -> None:
        """A step out of the ordinary (a long sample, a guest on the GPU) should not make the rest of the run slow."""
        self._good += 1
        if self.max_pass_samples < self.micro_batch and self._good >= self._patience:
            self.max_pass_samples, self._good = min(self.micro_batch, self.max_pass_samples * 2), 0
            self.strategy.micro_batch_changed()
            self.emit(
                "warning",
                kind="memory",
                message=f"step {step + 1}: memory allows again; micro-batch back to {self.max_pass_samples}",
            )


def power_of_two(value: float) -> float:
    """The power of two next to a number. Gradients are kept near their mean by it, which costs no rounding, and divided
    by the exact count at the end of the step."""
    return 2.0 ** round(math.log2(max(1.0, value)))


def as_loss(result: Any, samples: int) -> tuple[Loss, float]:
    """What a task may return as its loss, in one form, and the weight its sum has: a mean weighs as much as its samples."""
    if isinstance(result, Loss):
        if all(isinstance(value, Tensor) for value in result.metrics.values()):
            return result, 1.0
        metrics = {
            name: torch.as_tensor(value, device=result.sum.device) for name, value in result.metrics.items()
        }
        return replace(result, metrics=metrics), 1.0
    if isinstance(result, Tensor):
        if result.ndim:
            raise UserError(
                f"the task's loss is a tensor of shape {tuple(result.shape)}; a scalar, (sum, count) or Loss was needed"
            )
        return Loss(result, samples), float(samples)
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], Tensor):
        metrics: Mapping[str, Tensor] = result[2] if len(result) == 3 else {}
        return as_loss(Loss(result[0], result[1], metrics), samples)
    raise UserError(
        f"the task's loss is a {type(result).__name__}; a scalar tensor, (sum, count) or Loss was needed"
    )


def check_trainable(loss: Loss) -> None:
    """A loss that no weight can change is the task's mistake."""
    if not loss.sum.requires_grad:
        raise UserError(
            "the task's loss does not depend on any weight that is trained; compute it from the model's output, undetached"
        )


def build_checked_model(task: Task) -> nn.Module:
    """The task's model, which must be one."""
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the task's build_model returns a {type(model).__name__}; a torch.nn.Module was needed"
        )
    return model


def check_device(batch: Any, device: torch.device) -> None:
    for tensor in tensors_of(batch):
        if tensor.device.type != device.type or (
            device.index is not None and tensor.device.index != device.index
        ):
            raise UserError(
                f"a tensor of the batch is on {tensor.device}; the model is on {device}: leave the moving of batches to the loop"
            )


def seed_everything(seed: int, device: torch.device) -> None:
    """Randomness inside the model as a function of seed and step: nothing to save, and a repeated step draws the same."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _first_line(error: BaseException) -> str:
    """The error in one line: its class, and the first two lines of its message, of which the first may only say whose it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
