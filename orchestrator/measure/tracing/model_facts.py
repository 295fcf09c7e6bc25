"""Facts about a model for the plan: sizes, arithmetic and activations, traced with fake tensors.

A model that cannot be traced is built and run once on the CPU, with two samples and with four.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank
from experts.moe.gate import Gate
from experts.moe.routed import RoutedExperts
from experts.transformers.lora.adapters import count_adapted
from experts.transformers.lora.packing import counts_of_numbers, unpacking_bytes
from orchestrator.data.ray_rows import RayRows
from orchestrator.data.source import LoaderSettings
from orchestrator.errors import OrchestratorError, UserError
from orchestrator.measure.tracing.fake_batches import TrainingData, fake_tensor_mode, to_fake
from orchestrator.measure.tracing.gpu_emulation import emulated_gpu
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.measure.tracing.pass_memory import MemoryRecorder, PassTrace, RepeatedKind, pass_memory
from orchestrator.measure.tracing.repeated_blocks import find_repeated
from orchestrator.measure.tracing.traced_experts import record_experts
from orchestrator.plan.estimate import ModelFacts, TrainedTensors
from orchestrator.tasks.read_settings import settings_taken
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.tasks.token_loss import counting_gradient_flop, counting_logit_memory
from orchestrator.tasks.user_code import user_code
from orchestrator.tasks.validate import as_loss, build_checked_model, check_trainable, check_updates_declared
from orchestrator.train.checkpoint.state import model_tensors
from orchestrator.train.data.first_samples import first_samples
from orchestrator.train.data.steps import as_dataset, num_samples
from orchestrator.train.device.batches import tensors_of
from orchestrator.train.device.precision import autocast, store_frozen
from orchestrator.train.device.recompute import block_lists
from orchestrator.train.device.short_weights import computing_weights, shorten_weights
from orchestrator.train.optim.weight_copies import copied_stacks
from orchestrator.types import GIB, MIB, PrecisionName, bytes_text, count_text

_CPU = torch.device("cpu")
_GPU_UNIT = 512  # bytes, to multiples of which a GPU's allocator rounds
_LIBRARY_BYTES = 65 * MIB
"""Workspaces that a GPU's libraries keep from their first products on, on an H200."""
_SMALL_BATCH = 2  # samples; batch norm needs more than one
_MAX_BUILT_BYTES = 8 * GIB
"""Parameters of a model that may be built for a plan because it cannot be traced."""
_HASHED_SAMPLES = 16
_HASH_CHARACTERS = 16


@dataclass(frozen=True)
class _Pass:
    """One pass, forward and backward, over a batch."""

    memory: PassTrace
    flops: float
    """Of the forward pass."""
    count: float
    """The count of the loss; of a tensor, whose value is not known here, the samples."""


@dataclass(frozen=True)
class _TracedModel:
    """A model with its passes over a small batch and over one of twice the size.

    Their difference is the cost per sample; the remainder does not depend on the batch.
    """

    model: nn.Module
    small: _Pass
    twice: _Pass
    method: str
    changed_buffer: str = ""

    @property
    def flops_per_sample(self) -> float:
        more = max(0.0, self.twice.flops - self.small.flops)
        return (more or self.small.flops) / _SMALL_BATCH


def model_facts(
    task: Task,
    device_name: str,
    precision: PrecisionName,
    training: TrainingData | None = None,
    short_weights: bool = False,
) -> ModelFacts:
    """Return the facts of a task for a device and a precision; further traces may share ``training``.

    ``short_weights`` if weights are stored in bf16."""
    device = torch.device(device_name)
    training = training or TrainingData(task)
    with user_code("reading the training data"):
        data = training.read()
    with user_code("reading the validation data"):
        validation = task.validation_data() if hasattr(task, "validation_data") else None
    small = first_samples(data, _SMALL_BATCH)
    twice = first_samples(data, 2 * _SMALL_BATCH)
    try:
        traced = _trace_fake(task, small, twice, device, precision, short_weights)
    except Exception as error:  # not every model can be built or run without data
        _check_size(task, error)
        traced = _run_on_cpu(task, small, twice, short_weights)
    num_validation = num_samples(as_dataset(validation)) if validation is not None else 0
    if validation is not None and num_validation == 0:
        raise UserError("the validation data is empty; at least one sample is needed, or None in its place")
    facts = _facts(task, traced, data, num_validation)
    unpacked = unpacking_bytes(traced.model, on_gpu=device.type == "cuda")
    return replace(facts, unpacked_bytes=float(unpacked))


def _trace_fake(
    task: Task, small: Any, twice: Any, device: torch.device, precision: PrecisionName, short_weights: bool
) -> _TracedModel:
    """Trace the model with fake tensors on the device; a GPU that is not here is emulated."""
    on_gpu = device.type == "cuda"
    recorder = OpRecorder(on_gpu)
    with fake_tensor_mode() as mode, ExitStack() as stack:
        model = build_checked_model(task)
        store_frozen(model, precision)
        if short_weights:
            shorten_weights(model)
        record_experts(model, True, recorder)
        if on_gpu:
            stack.enter_context(emulated_gpu(precision, recorder))
        run = _PassRun(task, model, precision, recorder, on_gpu)
        before = _buffers(model)
        traces = [
            run.trace(to_fake(mode, batch, _CPU), samples)
            for batch, samples in ((small, _SMALL_BATCH), (twice, 2 * _SMALL_BATCH))
        ]
        changed = _first_changed(before, _buffers(model))
    method = f"traced for {device.type} in {precision}"
    return _TracedModel(model, *traces, method=method, changed_buffer=changed)


def _check_size(task: Task, error: Exception) -> None:
    """Raise if the model that could not be traced is too large to be built for a plan."""
    try:
        with fake_tensor_mode():
            parameters = list(build_checked_model(task).parameters())
    except Exception:  # its size is unknown: build it as the task does
        return
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    if num_bytes <= _MAX_BUILT_BYTES:
        return
    if isinstance(error, OrchestratorError):
        raise error
    raise UserError(
        f"the model has {count_text(sum(p.numel() for p in parameters))} parameters "
        f"({bytes_text(num_bytes)}), and a pass without memory failed, from which the plan knows its sizes: "
        f"{type(error).__name__}: {error}. Models above {bytes_text(_MAX_BUILT_BYTES)} are not built for a "
        "plan; let the model run with fake tensors (torch.compile needs the same)"
    ) from error


def _run_on_cpu(task: Task, small: Any, twice: Any, short_weights: bool) -> _TracedModel:
    """Run the model on the CPU in fp32. Errors are the user's: their message shows the user's
    frame."""
    with user_code("building the model"):
        model = build_checked_model(task)
    if short_weights:
        shorten_weights(model)
    try:
        run = _PassRun(task, model.to(_CPU), "fp32", OpRecorder())
        before = _buffers(model)
        traces = [
            run.trace(batch, samples) for batch, samples in ((small, _SMALL_BATCH), (twice, 2 * _SMALL_BATCH))
        ]
    except OrchestratorError:
        raise
    except Exception as error:
        with user_code("computing the loss of a first batch"):
            raise error
        raise
    changed = _first_changed(before, _buffers(model))
    return _TracedModel(model, *traces, method="run once on the CPU in fp32", changed_buffer=changed)


_Buffers = Mapping[str, tuple[Tensor, int]]
"""The buffers of a model's state, with the number of writes to each."""


def _buffers(model: nn.Module) -> _Buffers:
    saved = model.state_dict()
    return {name: (buffer, buffer._version) for name, buffer in model.named_buffers() if name in saved}


def _first_changed(before: _Buffers, after: _Buffers) -> str:
    """Return the name of the first buffer that was written, or replaced by another tensor."""
    for name, (buffer, version) in before.items():
        now, version_now = after.get(name, (None, version))
        if now is not buffer or version_now != version:
            return name
    return ""


@dataclass(frozen=True)
class _PassRun:
    """Forward and backward passes of a task's model."""

    task: Task
    model: nn.Module
    precision: PrecisionName
    recorder: OpRecorder
    on_gpu: bool = False

    def trace(self, batch: Any, samples: int) -> _Pass:
        """Run a pass over all blocks, or over the first and the last of each kind."""
        self.model.train()
        repeated = find_repeated(self.model)
        if repeated is not None:
            try:
                with repeated.keeping(repeated.first_and_last):
                    return self._run(batch, samples, repeated.kinds(_gradient_bytes))
            except Exception:  # the model counts on all of its blocks
                return self._run(batch, samples, [])
        return self._run(batch, samples, [])

    def _run(self, batch: Any, samples: int, kinds: Sequence[RepeatedKind]) -> _Pass:
        blocks = [block for alike in block_lists(self.model) for block in alike]
        experts = [layer.bank for _, layer in moe_layers(self.model)]
        rounding, libraries = (_GPU_UNIT, _LIBRARY_BYTES) if self.on_gpu else (1, 0)
        memory = MemoryRecorder([*blocks, *experts], len(blocks), rounding, libraries, self.recorder)
        memory.ignore([*self.model.parameters(), *self.model.buffers()])
        memory.count(tensors_of(batch))
        self.recorder.restart()
        with (
            _gradients_recorded(self.model, memory),
            memory.watching(),
            counting_logit_memory(memory) as logits,
            counting_gradient_flop() as gradient_flop,
            self.recorder,
            memory,
            computing_weights(self.model, self.precision),
        ):
            with autocast(self.precision, _CPU):
                loss, _ = as_loss(self.task.loss(self.model, batch), samples)
                check_trainable(loss)
                check_updates_declared(self.task, loss.updates)
            flops = self.recorder.flops - gradient_flop()
            loss.sum.backward()
            memory.record()
        flops += sum(kind.further * memory.regions[kind.last].flops for kind in kinds)
        count = float(samples if isinstance(loss.count, Tensor) else loss.count)
        return _Pass(PassTrace(memory, samples, kinds, logits.whole, logits.chunk), flops, count)


@contextmanager
def _gradients_recorded(model: nn.Module, memory: MemoryRecorder) -> Iterator[None]:
    """Record the gradients of a pass as soon as they are complete, and drop them after it."""
    experts = {id(p) for _, layer in moe_layers(model) for p in layer.bank.parameters()}
    hooks = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            record = partial(memory.record_gradient, of_experts=id(parameter) in experts)
            hooks.append(parameter.register_post_accumulate_grad_hook(record))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None


def _gradient_bytes(block: nn.Module) -> tuple[float, float]:
    """Return the bytes of the gradients of a block's dense part, and of its experts."""
    of_experts = 4.0 * _num_trained(_parameters_within(block, ExpertBank))
    return 4.0 * _num_trained(block.parameters()) - of_experts, of_experts


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)


def _facts(task: Task, traced: _TracedModel, data: Any, num_validation: int | None) -> ModelFacts:
    model = traced.model
    parameters = list(model.parameters())
    counts = counts_of_numbers(model)
    layers = [layer for _, layer in moe_layers(model)]
    expert_weights = _parameters_within(model, ExpertBank)
    loader: LoaderSettings | None = getattr(data, "loader_settings", None)
    own_optimizer = _has_own_optimizer(task, parameters)
    return ModelFacts(
        parameters=sum(counts.values()),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        expert_parameters=sum(counts[p] for p in expert_weights),
        gate_parameters=sum(p.numel() for p in _parameters_within(model, Gate)),
        experts=max((len(layer.load_E) for layer in layers), default=0),
        moe_layers=len(layers),
        blocks=sum(len(blocks) for blocks in block_lists(model)),
        flops_per_sample=traced.flops_per_sample,
        passes=pass_memory(traced.small.memory, traced.twice.memory),
        large_experts=sum(stack.numel() for _, _, stack in copied_stacks(model)),
        samples=num_samples(data),
        validation_samples=num_validation,
        unit=getattr(task, "unit", "samples"),
        units_per_sample=getattr(task, "units_per_sample", 1),
        gathered_bytes=data.nbytes if isinstance(data, Gatherable) else None,
        own_optimizer=own_optimizer,
        method=traced.method,
        expert_weights=tuple(_expert_parameters(layer, counts) for layer in layers),
        frozen_experts=sum(counts[p] for p in expert_weights if not p.requires_grad),
        settings=tuple(sorted(settings_taken(task, own_optimizer, _has_own_schedule(task)))),
        adapters=count_adapted(model),
        counts_batches=traced.small.count == traced.twice.count,
        limits_capacity=any(layer.capacity is not None for layer in layers),
        structure=_structure_hash(model),
        unsaved=_unsaved_parameters(model, counts),
        outer_parameters=_outer_parameters(model),
        weight_bytes=_mean_bytes(parameters, counts),
        packed_expert_bytes=_mean_bytes(expert_weights, counts) if _has_packed(expert_weights) else None,
        adamw_parameters=_left_by_muon(model),
        dense_tensors=_trained_tensors(model, of_experts=False),
        expert_tensors=_trained_tensors(model, of_experts=True),
        data=_data_hash(data) if isinstance(data, Gatherable) else "",
        loader_batch=loader.batch_size if loader is not None else None,
        loader_processes=loader.num_workers if loader is not None else None,
        fp8_obstacle=next(filter(None, (layer.bank.fp8_obstacle() for layer in layers)), ""),
        changed_buffer=traced.changed_buffer,
        has_data_tasks=isinstance(data, RayRows) and not data.is_materialized,
    )


def _outer_parameters(model: nn.Module) -> int:
    blocks = [block for alike in block_lists(model) for block in alike]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in inside)


def _left_by_muon(model: nn.Module) -> int:
    """Return the trained parameters of embeddings, and of all that is no matrix."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    stacks = {id(stack) for _, layer in moe_layers(model) for _, _, stack in layer.bank.stacks()}
    return sum(
        p.numel()
        for p in model.parameters()
        if p.requires_grad and (id(p) in tables or p.ndim - (id(p) in stacks) < 2)
    )


def _trained_tensors(model: nn.Module, of_experts: bool) -> TrainedTensors:
    experts = {id(p) for _, layer in moe_layers(model) for p in layer.bank.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad and (id(p) in experts) == of_experts)
    return TrainedTensors(tuple(sorted(Counter(tuple(p.shape) for p in trained).items())))


def _unsaved_parameters(model: nn.Module, counts: Mapping[nn.Parameter, int]) -> int:
    saved = model_tensors(model)
    return sum(counts[p] for name, p in model.named_parameters() if name not in saved)


def _mean_bytes(parameters: Sequence[nn.Parameter], counts: Mapping[nn.Parameter, int]) -> float:
    return sum(p.nbytes for p in parameters) / max(1, sum(counts[p] for p in parameters))


def _has_packed(parameters: Sequence[nn.Parameter]) -> bool:
    return any(not p.is_floating_point() for p in parameters)


def _structure_hash(model: nn.Module) -> str:
    tensors = sorted(model_tensors(model).items())
    lines = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_HASH_CHARACTERS]


def _data_hash(data: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors_of(first_samples(data, _HASHED_SAMPLES)):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_HASH_CHARACTERS]


def _expert_parameters(layer: RoutedExperts, counts: Mapping[nn.Parameter, int]) -> tuple[int, ...]:
    """Return the parameters of each expert."""
    stacks = [(group.rows, counts[stack] // len(group.rows)) for group, _, stack in layer.bank.stacks()]
    return tuple(sum(size for ids, size in stacks if expert in ids) for expert in layer.bank.held)


def _parameters_within(model: nn.Module, kind: type[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters in modules of a kind."""
    modules = [module for module in model.modules() if isinstance(module, kind)]
    return [p for module in modules for p in module.parameters()]


def _has_own_optimizer(task: Task, parameters: list[nn.Parameter]) -> bool:
    """Return whether the task makes its own optimizer. An error in it is reported when the
    optimizer is needed."""
    make = getattr(task, "build_optimizer", None)
    try:
        return make is not None and make(parameters) is not None
    except Exception:
        return True


def _has_own_schedule(task: Task) -> bool:
    """Return whether the task has its own schedule. An error in it is reported when it is needed."""
    try:
        return getattr(task, "schedule", lambda: None)() is not None
    except Exception:
        return True
