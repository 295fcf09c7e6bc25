"""The operations of a micro-batch, traced with fake tensors, which have shapes but no data.

The trace holds products with their sizes, the bytes that other operations move, and messages between
hosts. A GPU's step is traced without a GPU, so that a prediction for a
cluster does not depend on the machine that makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank
from experts.transformers.lora.packing import counts_of_numbers
from orchestrator.measure.tracing.fake_batches import TrainingData, fake_tensor_mode, to_fake
from orchestrator.measure.tracing.gpu_emulation import emulated_gpu
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.measure.tracing.repeated_blocks import trace_few_blocks
from orchestrator.measure.tracing.traced_experts import (
    NO_COPIES,
    copies_of_stacks,
    divide_experts,
    record_experts,
)
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.tasks.task import Task
from orchestrator.tasks.validate import as_loss, build_checked_model
from orchestrator.train.data.first_samples import first_samples
from orchestrator.train.device.precision import autocast, store_frozen
from orchestrator.train.device.recompute import recompute_blocks
from orchestrator.types import PrecisionName

_CPU = torch.device("cpu")
_OPS = ("products", "attentions", "moves", "messages")
_COUNTS = ("operations", "launches", "sorts", "views")


@dataclass(frozen=True)
class TraceOptions:
    """The device, the precision and the parallelism that a trace is for."""

    on_gpu: bool = False
    precision: PrecisionName = "fp32"
    grouped: bool = True
    """Experts of one size run in one operation, if their sizes allow it; otherwise one after
    another."""
    hosts: int = 1
    chunks: int = 1
    recompute: bool = False
    """Blocks are recomputed in the backward pass."""
    recompute_experts: bool = False
    """Experts are, where blocks are not."""
    keeps_copies: bool = False
    """The optimizer keeps copies of large experts' weights in bf16."""


def trace_micro_batch(
    task: Task, samples: int, options: TraceOptions | None = None, data: TrainingData | None = None
) -> MicroBatchOps:
    """Return the operations of one micro-batch on one device, forward and backward.

    With several hosts they are those of the first host. Each host has ``samples``, and the tokens
    are spread evenly over the experts. ``data`` may have been read by an earlier trace.
    """
    options = options or TraceOptions()
    data = data or TrainingData(task)
    batch = first_samples(data.read(), samples)
    with fake_tensor_mode() as mode, ExitStack() as stack:
        model = build_checked_model(task)
        store_frozen(model, options.precision)
        model.train()
        recorder = OpRecorder(options.on_gpu)
        context = divide_experts(model, options.hosts, options.chunks, recorder)
        copies = copies_of_stacks(model) if options.keeps_copies else NO_COPIES
        record_experts(model, options.grouped, recorder, copies)
        for _, layer in moe_layers(model):
            layer.bank.recomputes = options.recompute_experts and not options.recompute
        if options.recompute:
            recompute_blocks(model, context)
        if options.on_gpu:
            stack.enter_context(emulated_gpu(options.precision, recorder))
        run = _StepRun(task, model, to_fake(mode, batch, _CPU), samples, options.precision, recorder, copies)
        ops = run.trace()
    parameters = list(model.parameters())
    counts = counts_of_numbers(model)
    own_experts = _expert_parameters(model) if options.hosts > 1 else []
    frozen = [p for p in parameters if not p.requires_grad]
    frozen_experts = [p for p in own_experts if not p.requires_grad]
    return replace(
        ops,
        samples=samples,
        parameters=sum(counts.values()),
        expert_parameters=sum(counts[p] for p in own_experts),
        frozen=sum(counts[p] for p in frozen),
        frozen_experts=sum(counts[p] for p in frozen_experts),
        frozen_bytes=sum(p.nbytes for p in frozen),
        frozen_expert_bytes=sum(p.nbytes for p in frozen_experts),
        tensors=sum(1 for p in parameters if p.requires_grad),
    )


@dataclass(frozen=True)
class _StepRun:
    """Forward and backward passes of a model over one fake batch, which ``recorder`` watches."""

    task: Task
    model: nn.Module
    batch: Any
    samples: int
    precision: PrecisionName
    recorder: OpRecorder
    copies: Mapping[Tensor, Tensor]
    """Copies that are trained in place of parameters."""

    def trace(self) -> MicroBatchOps:
        """Return the operations of a pass over all blocks."""
        parameters = [self.copies.get(p, p) for p in self.model.parameters()]
        return trace_few_blocks(self.model, lambda: self._run(parameters), _all_blocks)

    def _run(self, parameters: Sequence[Tensor]) -> MicroBatchOps:
        # Of all parameters: those of blocks that are left out have gradients of an earlier pass.
        for parameter in parameters:
            parameter.grad = None
        self.recorder.restart()
        with self.recorder:
            with autocast(self.precision, _CPU):
                loss, _ = as_loss(self.task.loss(self.model, self.batch), self.samples)
            loss.sum.backward()
        return self.recorder.recorded_ops()


def _all_blocks(base: MicroBatchOps, pairs: Sequence[tuple[MicroBatchOps, int]]) -> MicroBatchOps:
    """Return the pass over all blocks; see ``trace_few_blocks``.

    It is ``base`` plus, for each pair, what the pair has more, as often as its number says."""
    changes: dict[str, Any] = {}
    for name in _OPS:
        counts = _times(getattr(base, name))
        total = Counter(counts)
        for ops, further in pairs:
            more = _times(getattr(ops, name))
            more.subtract(counts)
            for op, times in more.items():
                total[op] += further * times
        changes[name] = tuple(replace(op, times=times) for op, times in total.items() if times > 0)
    for name in _COUNTS:
        one = getattr(base, name)
        changes[name] = one + sum(further * (getattr(ops, name) - one) for ops, further in pairs)
    if base.before_wait is not None:
        waits = [(ops.before_wait or base.before_wait, further) for ops, further in pairs]
        changes["before_wait"] = _all_blocks(base.before_wait, waits)
    return replace(base, **changes)


def _times(ops: Sequence[Any]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for op in ops:
        counts[replace(op, times=1)] += op.times
    return counts


def _expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    banks = [module for module in model.modules() if isinstance(module, ExpertBank)]
    return [parameter for bank in banks for parameter in bank.parameters()]


def experts_of(task: Task) -> int:
    """Return the number of experts of the layer with the most; 0 for a dense model."""
    with fake_tensor_mode():
        layers = moe_layers(build_checked_model(task))
        return max((len(layer.load_E) for _, layer in layers), default=0)
