"""Facts about a model for the plan: its sizes, its arithmetic, and passes that are traced for it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank
from experts.moe.gate import Gate
from experts.moe.routed import RoutedExperts
from experts.transformers.lora.adapters import count_adapted
from orchestrator.data.ray_rows import RayRows
from orchestrator.data.source import LoaderSettings
from orchestrator.errors import UserError
from orchestrator.measure.tracing.fake_batches import TrainingData, first_samples
from orchestrator.measure.tracing.passes import SMALL_BATCH, TracedPasses
from orchestrator.plan.cost.devices import catalogue
from orchestrator.plan.estimate import ModelFacts
from orchestrator.tasks.read_settings import settings_taken
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.tasks.user_code import user_code
from orchestrator.train.checkpoint.state import model_tensors
from orchestrator.train.data.steps import as_dataset, num_samples
from orchestrator.train.device.batches import tensors_of
from orchestrator.train.device.recompute import block_lists
from orchestrator.train.optim.weight_copies import copied_stacks
from orchestrator.types import MIB, PrecisionName

_HASHED_SAMPLES = 16
_HASH_CHARACTERS = 16


def model_facts(task: Task, device_name: str, precision: PrecisionName) -> ModelFacts:
    """Return the facts of a task for a device and a precision."""
    training = TrainingData(task)
    with user_code("reading the training data"):
        data = training.data
    with user_code("reading the validation data"):
        validation = task.validation_data() if hasattr(task, "validation_data") else None
    num_validation = num_samples(as_dataset(validation)) if validation is not None else 0
    on_gpu = torch.device(device_name).type == "cuda"
    passes = TracedPasses(task, on_gpu, precision, training)
    model, small, twice = passes.first_passes()
    if validation is not None and num_validation == 0:
        raise UserError("the validation data is empty; at least one sample is needed, or None in its place")
    parameters = list(model.parameters())
    layers = [layer for _, layer in moe_layers(model)]
    loader: LoaderSettings | None = getattr(data, "loader_settings", None)
    own_optimizer = _has_own_optimizer(task, parameters)
    more_flops = max(0.0, twice.forward_flops - small.forward_flops)
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        expert_parameters=_parameters_within(model, ExpertBank),
        gate_parameters=_parameters_within(model, Gate),
        experts=max((len(layer.load_E) for layer in layers), default=0),
        moe_layers=len(layers),
        blocks=sum(len(blocks) for blocks in block_lists(model)),
        flops_per_sample=(more_flops or small.forward_flops) / SMALL_BATCH,
        passes=passes,
        workspace_bytes=catalogue().achieved.reserved_mib * MIB if on_gpu else 0.0,
        large_experts=sum(stack.numel() for _, _, stack in copied_stacks(model)),
        samples=num_samples(data),
        validation_samples=num_validation,
        unit=getattr(task, "unit", "samples"),
        units_per_sample=getattr(task, "units_per_sample", 1),
        gathered_bytes=data.nbytes if isinstance(data, Gatherable) else None,
        own_optimizer=own_optimizer,
        method=passes.method,
        expert_weights=tuple(_expert_parameters(layer) for layer in layers),
        frozen_experts=_parameters_within(model, ExpertBank, trained=False),
        settings=tuple(sorted(settings_taken(task, own_optimizer, _has_own_schedule(task)))),
        adapters=count_adapted(model),
        counts_batches=small.count == twice.count,
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
