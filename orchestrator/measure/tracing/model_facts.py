"""Facts about a model for the plan: sizes, arithmetic and activations, traced with fake tensors.

A model that cannot be traced is built and run once on the CPU, with two samples and with four.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank
from experts.moe.gate import Gate
from experts.moe.routed import RoutedExperts
from experts.transformers.lora.adapters import count_adapted
from orchestrator.data.ray_rows import RayRows
from orchestrator.data.source import LoaderSettings
from orchestrator.errors import OrchestratorError, UserError
from orchestrator.measure.tracing.fake_batches import TrainingData, fake_tensor_mode, first_samples, to_fake
from orchestrator.measure.tracing.gpu_emulation import emulated_gpu
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.measure.tracing.operator_sizes import attention_formulas
from orchestrator.measure.tracing.repeated_blocks import trace_few_blocks
from orchestrator.measure.tracing.traced_experts import record_experts
from orchestrator.plan.estimate import ModelFacts
from orchestrator.tasks.read_settings import settings_taken
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.tasks.token_loss import counting_gradient_flop
from orchestrator.tasks.user_code import user_code
from orchestrator.tasks.validate import as_loss, build_checked_model, check_trainable, check_updates_declared
from orchestrator.train.checkpoint.state import model_tensors
from orchestrator.train.data.steps import as_dataset, num_samples
from orchestrator.train.device.batches import tensors_of
from orchestrator.train.device.precision import autocast, store_frozen
from orchestrator.train.device.recompute import block_lists
from orchestrator.train.optim.weight_copies import copied_stacks
from orchestrator.types import GIB, PrecisionName, bytes_text, count_text

_SMALL_BATCH = 2  # samples; batch norm needs more than one
_MAX_BUILT_BYTES = 8 * GIB
"""Parameters of a model that may be built for a plan because it cannot be traced."""
_HASHED_SAMPLES = 16
_HASH_CHARACTERS = 16


@dataclass(frozen=True)
class ForwardTrace:
    """One forward pass: its FLOP, and the bytes that it saved for the backward pass."""

    flops: float
    saved: float
    saved_in_blocks: float
    block_inputs: float
    largest: float
    saved_in_experts: float
    """Without the inputs of the experts."""
    expert_inputs: float
    """Inputs of experts that nothing saves: recomputed experts keep them."""
    count: float
    """The count of the loss; of a tensor, whose value is not known here, the samples."""


@dataclass(frozen=True)
class _TracedModel:
    """A model with its forward passes over a small batch and over one of twice the size.

    Their difference is the cost per sample; the remainder does not depend on the batch.
    """

    model: nn.Module
    small: ForwardTrace
    twice: ForwardTrace
    method: str

    def per_sample(self) -> ForwardTrace:
        differences = [
            max(0.0, more - less) / _SMALL_BATCH
            for more, less in zip(astuple(self.twice), astuple(self.small), strict=True)
        ]
        return ForwardTrace(*differences)


def model_facts(
    task: Task, device_name: str, precision: PrecisionName, training: TrainingData | None = None
) -> ModelFacts:
    """Return the facts of a task for a device and a precision; further traces may share ``training``."""
    device = torch.device(device_name)
    training = training or TrainingData(task)
    with user_code("reading the training data"):
        data = training.read()
    with user_code("reading the validation data"):
        validation = task.validation_data() if hasattr(task, "validation_data") else None
    small = first_samples(data, _SMALL_BATCH)
    twice = first_samples(data, 2 * _SMALL_BATCH)
    try:
        traced = _trace_fake(task, small, twice, device, precision)
    except Exception as error:  # not every model can be built or run without data
        _check_size(task, error)
        traced = _run_on_cpu(task, small, twice)
    num_validation = num_samples(as_dataset(validation)) if validation is not None else 0
    if validation is not None and num_validation == 0:
        raise UserError("the validation data is empty; at least one sample is needed, or None in its place")
    return _facts(task, traced, data, num_validation)


def _trace_fake(
    task: Task, small: Any, twice: Any, device: torch.device, precision: PrecisionName
) -> _TracedModel:
    """Trace the model with fake tensors on the device; a GPU that is not here is emulated."""
    emulated = device.type == "cuda" and not torch.cuda.is_available()
    recorder = OpRecorder(on_gpu=True) if emulated else None
    method = f"traced for {device.type} in {precision}"
    if emulated:
        device = torch.device("cpu")
    with fake_tensor_mode() as mode, torch.device(device), ExitStack() as stack:
        model = build_checked_model(task)
        store_frozen(model, precision)
        if recorder is not None:
            record_experts(model, True, recorder)
            stack.enter_context(emulated_gpu(precision, recorder))
        run = _ForwardRun(task, model, precision, device, recorder)
        traces = [
            run.trace(to_fake(mode, batch, device), samples)
            for batch, samples in ((small, _SMALL_BATCH), (twice, 2 * _SMALL_BATCH))
        ]
    return _TracedModel(model, *traces, method=method)


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


def _run_on_cpu(task: Task, small: Any, twice: Any) -> _TracedModel:
    """Run the model on the CPU in fp32. Errors are the user's: their message shows the user's
    frame."""
    with user_code("building the model"):
        model = build_checked_model(task)
    cpu = torch.device("cpu")
    try:
        run = _ForwardRun(task, model.to(cpu), "fp32", cpu)
        traces = [
            run.trace(batch, samples) for batch, samples in ((small, _SMALL_BATCH), (twice, 2 * _SMALL_BATCH))
        ]
    except OrchestratorError:
        raise
    except Exception as error:
        with user_code("computing the loss of a first batch"):
            raise error
        raise
    return _TracedModel(model, *traces, method="run once on the CPU in fp32")


@dataclass(frozen=True)
class _ForwardRun:
    """Forward passes of a task's model. ``recorder`` counts the FLOP of an emulated GPU."""

    task: Task
    model: nn.Module
    precision: PrecisionName
    device: torch.device
    recorder: OpRecorder | None = None

    def trace(self, batch: Any, samples: int) -> ForwardTrace:
        """Run one forward pass and count its FLOP and the bytes that it saves."""
        self.model.train()
        blocks = [block for alike in block_lists(self.model) for block in alike]
        return trace_few_blocks(self.model, lambda: self._trace(batch, samples, blocks), _all_blocks)

    def _trace(self, batch: Any, samples: int, blocks: Sequence[nn.Module]) -> ForwardTrace:
        counter = _SavedTensorCounter(self.model)
        banks = [layer.bank for _, layer in moe_layers(self.model)]
        with (
            self._counting_flops() as flops,
            counter.watching(blocks),
            counter.watching_experts(banks),
            counter.counting(),
            autocast(self.precision, self.device),
        ):
            loss, _ = as_loss(self.task.loss(self.model, batch), samples)
            check_trainable(loss)
            check_updates_declared(self.task, loss.updates)
        return ForwardTrace(
            flops=flops(),
            saved=counter.total,
            saved_in_blocks=counter.in_blocks,
            block_inputs=float(counter.block_inputs),
            largest=counter.largest,
            saved_in_experts=counter.in_experts,
            expert_inputs=counter.unsaved_expert_inputs,
            count=float(samples if isinstance(loss.count, Tensor) else loss.count),
        )

    @contextmanager
    def _counting_flops(self) -> Iterator[Callable[[], float]]:
        """Count the FLOP of the forward pass alone: a loss in chunks computes gradients with it."""
        if self.recorder is None:
            counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
            with counting_gradient_flop() as gradient_flop, counter:
                yield lambda: float(counter.get_total_flops() - gradient_flop())
        else:
            recorder = self.recorder
            recorder.restart()
            with counting_gradient_flop() as gradient_flop, recorder:
                yield lambda: recorder.recorded_ops().flops - gradient_flop()


def _all_blocks(base: ForwardTrace, pairs: list[tuple[ForwardTrace, int]]) -> ForwardTrace:
    """Return the pass over all blocks; see ``trace_few_blocks``."""
    one_of_each = astuple(base)
    totals = list(one_of_each)
    for pair, further in pairs:
        for index, value in enumerate(astuple(pair)):
            totals[index] += further * (value - one_of_each[index])
    largest = max(base.largest, *(pair.largest for pair, _ in pairs))
    return replace(ForwardTrace(*totals), largest=largest)


class _SavedTensorCounter:
    """Counts the bytes that autograd saves for the backward pass: each storage once, without
    parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        self._saved: list[Tensor] = []
        self._inside_block = False
        self.total = 0.0
        self.in_blocks = 0.0
        self.block_inputs = 0
        self.largest = 0.0
        self.in_experts = 0.0
        self._own_inputs: set[int] | None = None
        """Storages that experts are called with, while they compute."""
        self._expert_inputs: dict[int, Tensor] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._saved.append(tensor.detach())  # keeps the address from being used by a later storage
            size = storage.nbytes()
            self.total += size
            self.in_blocks += size if self._inside_block else 0.0
            if self._own_inputs is not None and storage._cdata not in self._own_inputs:
                self.in_experts += size
            self.largest = max(self.largest, size)
        return tensor

    @property
    def unsaved_expert_inputs(self) -> float:
        """Bytes of the experts' inputs that nothing has saved."""
        inputs = self._expert_inputs.items()
        return float(sum(kept.untyped_storage().nbytes() for key, kept in inputs if key not in self._seen))

    @contextmanager
    def watching_experts(self, banks: Sequence[ExpertBank]) -> Iterator[None]:
        """Note when the pass is inside experts, and their inputs."""

        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            *tensors, row_map = arguments
            if row_map is not None:
                tensors += [row_map.token_R, row_map.row_TK]
            inputs = {tensor.untyped_storage()._cdata: tensor.detach() for tensor in tensors}
            self._own_inputs = set(inputs)
            self._expert_inputs |= inputs

        def leave(*_: Any) -> None:
            self._own_inputs = None

        with _hooked(banks, enter, leave):
            yield

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Note when the pass is inside a repeated block, and the bytes of the blocks' inputs."""

        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            inputs = [tensor for tensor in tensors_of(arguments) if tensor.is_floating_point()]
            self.block_inputs += sum(tensor.nbytes for tensor in inputs)
            self._inside_block = True

        def leave(*_: Any) -> None:
            self._inside_block = False

        with _hooked(blocks, enter, leave):
            yield


@contextmanager
def _hooked(
    modules: Sequence[nn.Module], enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Call functions before and after the forward passes of modules."""
    hooks = []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _facts(task: Task, traced: _TracedModel, data: Any, num_validation: int | None) -> ModelFacts:
    model = traced.model
    small = traced.small
    per_sample = traced.per_sample()
    base = max(0.0, small.saved - _SMALL_BATCH * per_sample.saved)
    parameters = list(model.parameters())
    layers = [layer for _, layer in moe_layers(model)]
    loader: LoaderSettings | None = getattr(data, "loader_settings", None)
    own_optimizer = _has_own_optimizer(task, parameters)
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        expert_parameters=_parameters_within(model, ExpertBank),
        gate_parameters=_parameters_within(model, Gate),
        experts=max((len(layer.load_E) for layer in layers), default=0),
        moe_layers=len(layers),
        blocks=sum(len(blocks) for blocks in block_lists(model)),
        flops_per_sample=per_sample.flops or small.flops / _SMALL_BATCH,
        activation_bytes=per_sample.saved,
        activation_base=base,
        block_bytes=per_sample.saved_in_blocks,
        block_input_bytes=per_sample.block_inputs,
        largest_bytes=per_sample.largest,
        expert_bytes=per_sample.saved_in_experts,
        expert_input_bytes=per_sample.expert_inputs,
        expert_base=min(base, max(0.0, small.saved_in_experts - _SMALL_BATCH * per_sample.saved_in_experts)),
        large_experts=sum(stack.numel() for _, _, stack in copied_stacks(model)),
        samples=num_samples(data),
        validation_samples=num_validation,
        unit=getattr(task, "unit", "samples"),
        units_per_sample=getattr(task, "units_per_sample", 1),
        gathered_bytes=data.nbytes if isinstance(data, Gatherable) else None,
        own_optimizer=own_optimizer,
        method=traced.method,
        expert_weights=tuple(_expert_parameters(layer) for layer in layers),
        frozen_experts=_parameters_within(model, ExpertBank, trained=False),
        settings=tuple(sorted(settings_taken(task, own_optimizer, _has_own_schedule(task)))),
        adapters=count_adapted(model),
        counts_batches=small.count == traced.twice.count,
        limits_capacity=any(layer.capacity is not None for layer in layers),
        structure=_structure_hash(model),
        unsaved=_unsaved_parameters(model),
        outer_parameters=_outer_parameters(model),
        weight_bytes=sum(p.nbytes for p in parameters) / max(1, sum(p.numel() for p in parameters)),
        data=_data_hash(data) if isinstance(data, Gatherable) else "",
        loader_batch=loader.batch_size if loader is not None else None,
        loader_processes=loader.num_workers if loader is not None else None,
        fp8_obstacle=next(filter(None, (layer.bank.fp8_obstacle() for layer in layers)), ""),
        has_data_tasks=isinstance(data, RayRows) and not data.is_materialized,
    )


def _outer_parameters(model: nn.Module) -> int:
    blocks = [block for alike in block_lists(model) for block in alike]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in inside)


def _unsaved_parameters(model: nn.Module) -> int:
    saved = model_tensors(model)
    return sum(p.numel() for name, p in model.named_parameters() if name not in saved)


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


def _expert_parameters(layer: RoutedExperts) -> tuple[int, ...]:
    """Return the parameters of each expert."""
    stacks = [(group.rows, stack[0].numel()) for group, _, stack in layer.bank.stacks()]
    return tuple(sum(size for ids, size in stacks if expert in ids) for expert in layer.bank.held)


def _parameters_within(model: nn.Module, kind: type[nn.Module], trained: bool | None = None) -> int:
    """Return the parameters in modules of a kind; only the trained or the frozen ones if ``trained`` is
    given."""
    modules = [module for module in model.modules() if isinstance(module, kind)]
    parameters = [p for module in modules for p in module.parameters()]
    return sum(p.numel() for p in parameters if trained in (None, p.requires_grad))


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
