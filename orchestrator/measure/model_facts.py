"""Facts about a model for the plan: sizes, arithmetic and activations, traced with tensors that have shapes but no data.

Where a model cannot be traced so, it is built and run once on the CPU, with two samples and with four."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from experts.balance import moe_layers
from experts.bank import ExpertBank
from experts.gate import Gate
from experts.layer import MoELayer
from orchestrator.errors import OrchestratorError, UserError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.tasks.load import user_code
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.tasks.validate import as_loss, build_checked_model, check_trainable
from orchestrator.train.batches import tensors_of, to_device
from orchestrator.train.data import Feed, as_dataset
from orchestrator.train.loading import LoaderOptions
from orchestrator.train.parts.precision import autocast
from orchestrator.train.parts.recompute import block_lists
from orchestrator.train.parts.world import World
from orchestrator.types import PrecisionName

_SMALL = 2  # samples of the smaller batch: batch norm wants more than one


@dataclass(frozen=True)
class ForwardTrace:
    """One forward pass: its arithmetic and what it kept."""

    flops: float
    kept: float
    in_blocks: float
    block_inputs: float
    largest: float


def model_facts(task: Task, on: str, precision: PrecisionName) -> ModelFacts:
    """The facts of a task for a device and precision."""
    device = torch.device(on)
    with user_code("reading the training data"):
        data = as_dataset(task.train_data())
    with user_code("reading the validation data"):
        validation = task.validation_data() if hasattr(task, "validation_data") else None
    batches = first_samples(data, _SMALL), first_samples(data, 2 * _SMALL)
    try:
        with quietly(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.device(device):
            model = build_checked_model(task)
            one, two = (
                _trace(task, model, fake_batch(mode, b, device), n * _SMALL, precision, device)
                for n, b in enumerate(batches, 1)
            )
        method = f"traced for {device.type} in {precision}"
    except Exception:  # not every model can be built or run without data: run it for real, small
        model, one, two = _run_small(task, batches)
        method = "run once on the CPU in fp32"
    return _facts(task, model, data, validation, one, two, method)


def _run_small(task: Task, batches: tuple[Any, Any]) -> tuple[nn.Module, ForwardTrace, ForwardTrace]:
    cpu = torch.device("cpu")
    with user_code("building the model"):
        model = build_checked_model(task)
    try:
        one, two = (_trace(task, model.to(cpu), b, n * _SMALL, "fp32", cpu) for n, b in enumerate(batches, 1))
    except OrchestratorError:
        raise
    except Exception as error:
        with user_code("computing the loss of a first batch"):
            raise error
        raise
    return model, one, two


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's own account of why something cannot be traced: it will be run instead."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def first_samples(data: Any, count: int) -> Any:
    """The first samples as a batch (the same one twice where there is only one)."""
    if len(data) == 0:
        raise UserError("the training data is empty; at least one sample is needed")
    if isinstance(data, Gatherable):
        return data.gather(torch.arange(count) % len(data))
    feed = Feed(
        data,
        World.single_process(),
        global_batch=count,
        micro_batch=count,
        seed=None,
        loader=LoaderOptions(),
    )
    return next(feed.steps(0)).micro_batches[0].fetch()


def fake_batch(mode: FakeTensorMode, batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return mode.from_tensor(batch).to(device)
    if isinstance(batch, dict):
        return {key: fake_batch(mode, value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        made = [fake_batch(mode, value, device) for value in batch]
        return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
    return to_device(batch, device, pin=False)


def _trace(
    task: Task, model: nn.Module, batch: Any, samples: int, precision: PrecisionName, device: torch.device
) -> ForwardTrace:
    model.train()
    kept = _SavedTensorCounter(model)
    inputs = 0

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal inputs
        inputs += sum(t.nbytes for t in tensors_of(arguments) if t.is_floating_point())
        kept.inside = True

    def leave(*_: Any) -> None:
        kept.inside = False

    blocks = [block for alike in block_lists(model) for block in alike]
    hooks = [
        hook for b in blocks for hook in (b.register_forward_pre_hook(enter), b.register_forward_hook(leave))
    ]
    try:
        with FlopCounterMode(display=False) as counter, kept.listening(), autocast(precision, device):
            loss, _ = as_loss(task.loss(model, batch), samples)
            check_trainable(loss)
    finally:
        for hook in hooks:
            hook.remove()
    return ForwardTrace(
        float(counter.get_total_flops()), kept.total, kept.in_blocks, float(inputs), kept.largest
    )


class _SavedTensorCounter:
    """Counts what autograd keeps for the backward pass: each storage once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
        self._alive: list[Tensor] = []
        self.inside = False
        self.total = self.in_blocks = self.largest = 0.0

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(tensor.detach())  # so that no later storage takes the same address
            size = storage.nbytes()
            self.total += size
            self.in_blocks += size if self.inside else 0.0
            self.largest = max(self.largest, size)
        return tensor

    @contextmanager
    def listening(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield


def _facts(
    task: Task,
    model: nn.Module,
    data: Any,
    validation: Any,
    one: ForwardTrace,
    two: ForwardTrace,
    method: str,
) -> ModelFacts:
    parameters = list(model.parameters())
    layers = moe_layers(model)
    per_sample = ForwardTrace(
        *(max(0.0, more - less) / _SMALL for more, less in zip(astuple(two), astuple(one), strict=True))
    )
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        expert_parameters=_within(model, ExpertBank),
        gate_parameters=_within(model, Gate),
        experts=max((len(layer.load_E) for _, layer in layers), default=0),
        moe_layers=len(layers),
        blocks=sum(len(blocks) for blocks in block_lists(model)),
        flops_per_sample=per_sample.flops or one.flops / _SMALL,
        activation_bytes=per_sample.kept,
        activation_base=max(0.0, one.kept - _SMALL * per_sample.kept),
        block_bytes=per_sample.in_blocks,
        block_input_bytes=per_sample.block_inputs,
        largest_bytes=per_sample.largest,
        samples=len(data),
        validation_samples=len(as_dataset(validation)) if validation is not None else 0,
        unit=getattr(task, "unit", "samples"),
        units_per_sample=getattr(task, "units_per_sample", 1),
        gathered_bytes=data.nbytes if isinstance(data, Gatherable) else None,
        own_optimizer=_brings_optimizer(task, parameters),
        method=method,
        expert_weights=tuple(_weights(layer) for _, layer in layers),
    )


def _weights(layer: MoELayer) -> tuple[int, ...]:
    """Parameters of each expert."""
    stacks = [(group, stack[0].numel()) for group, _, stack in layer.bank.stacks()]
    return tuple(sum(size for group, size in stacks if expert in group.ids) for expert in layer.bank.held)


def _within(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(
        p.numel() for module in model.modules() if isinstance(module, kind) for p in module.parameters()
    )


def _brings_optimizer(task: Task, parameters: list[nn.Parameter]) -> bool:
    """Whether the task makes its own optimizer. One that raises is told about when it is really needed."""
    make = getattr(task, "build_optimizer", None)
    try:
        return make is not None and make(parameters) is not None
    except Exception:
        return True
