"""Training of adapters on families of ``transformers``: ours on hosts, and PEFT's in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.expert_state import split_experts, stacked_names
from experts.model import fill_normal, mix
from experts.transformers.lora.adapters import LoraOptions, add_lora
from experts.transformers.lora.packing import pack_frozen, unpack_frozen
from experts.transformers.lora.peft_files import adapter_config, peft_tensors
from experts.transformers.registration import use
from experts.types import Packing
from harness.lm.families import FamilyTask, build, next_token_loss
from harness.lm.family_runs import (
    CPU,
    GLOBAL_BATCH,
    STEPS,
    global_batches,
    gradients_of,
    move_experts,
    placement,
)
from harness.runs.host_runs import by_expert, step_batches
from harness.runs.steppers import make_stepper, mean_loss
from orchestrator.config.settings import Config
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world

OPTIONS = LoraOptions(rank=3, alpha=5.0)


@dataclass(frozen=True)
class LoraRun:
    """Losses of the steps, gradients of the first, and adapters after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class PackedOptions(LoraOptions):
    """Adapters beside packed weights or, ``whole``, beside the numbers in fp64 that those stand for."""

    packing: Packing = "nf4"
    whole: bool = False


@dataclass(frozen=True)
class LoraTask(FamilyTask):
    """A family with adapters that are not zero."""

    options: LoraOptions = OPTIONS

    def build_model(self) -> nn.Module:
        model = use(build(self.name))
        if isinstance(self.options, PackedOptions):
            pack_frozen(model, self.options.packing)
            if self.options.whole:
                unpack_frozen(model, torch.float64)
        add_lora(model, self.options).double()
        fill_adapters(model)
        return model


@torch.no_grad()
def fill_adapters(model: nn.Module) -> None:
    """Fill both matrices of each adapter, so that each has a gradient."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in split_experts(trained, stacked_names(model)).items():
        fill_normal(tensor, 0.3, mix(name))


def train_lora(
    name: str,
    world: World,
    moves: bool = False,
    data_parallel: bool = False,
    options: LoraOptions = OPTIONS,
    micro_batch: int = 2,
) -> LoraRun:
    """Train adapters with our experts, two samples at a time. ``moves``: experts move between two hosts."""
    host_of = None if data_parallel else placement(name, world.size)
    stepper, feed = make_stepper(
        LoraTask(name, options=options),
        micro_batch,
        GLOBAL_BATCH,
        1e-3,
        clip_norm=1e9,
        world=world,
        host_of=host_of,
    )
    model = stepper.strategy.model
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(step_batches(feed, STEPS)):
        losses.append(mean_loss(stepper.run(batch, step)))
        gradients = gradients or gradients_of(model)
        if moves and step == 1:
            assert host_of is not None
            move_experts(stepper, host_of)
    weights = by_expert(model, {key: p for key, p in model.named_parameters() if p.requires_grad})
    return LoraRun(losses, gradients, weights)


def lora_on_hosts(
    rank: int,
    size: int,
    store: str,
    names: Sequence[str],
    moves: bool = False,
    options: LoraOptions = OPTIONS,
) -> dict[str, LoraRun]:
    runs: dict[str, LoraRun] = {}
    for name in names:
        path = f"{store}-{names.index(name)}"
        with process_group_world(file_store(path, size), rank, size, CPU, "gloo", 60) as world:
            runs[name] = train_lora(name, world, moves, options=options)
    return runs


def lora_in_data_parallel(rank: int, size: int, store: str, name: str) -> LoraRun:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        return train_lora(name, world, data_parallel=True)


def peft_model(name: str, options: LoraOptions = OPTIONS) -> Any:
    """Return the eager model of a family with PEFT's own adapters, filled as ours are."""
    import peft

    ours = LoraTask(name, options=options).build_model()
    model = peft.get_peft_model(build(name), adapter_config(ours, options))
    state = in_peft_names([by_expert(ours, dict(ours.named_parameters()))])
    result: Any = peft.set_peft_model_state_dict(model, state)
    missing = [key for key in result.missing_keys if "lora_" in key]
    assert not missing, missing
    assert not result.unexpected_keys, result.unexpected_keys
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in key)
    return model


def in_peft_names(hosts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the adapters of all hosts as PEFT saves them."""
    tensors = {name: tensor for host in hosts for name, tensor in host.items()}
    return dict(peft_tensors(tensors, tensors.__getitem__))


def train_peft(name: str) -> LoraRun:
    """Train PEFT's adapters in a plain loop of torch. The tensors have the names of PEFT's file."""
    import peft

    model = peft_model(name)
    settings = Config.of(learning_rate=1e-3).optim
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=1e-3, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for (ids,) in global_batches(FamilyTask(name).train_data()):
        optimizer.zero_grad()
        total, count = next_token_loss(model, ids)
        (total / count).backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        gradients = gradients or {key.replace(".default.", "."): grad for key, grad in grads.items()}
        optimizer.step()
        losses.append(float(total.detach()) / count)
    weights = {key: tensor.clone() for key, tensor in peft.get_peft_model_state_dict(model).items()}
    return LoraRun(losses, gradients, weights)


def worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest element."""
    assert actual.keys() == expected.keys()
    off = [(actual[key] - e).abs().max() / e.abs().max().clamp(min=1e-6) for key, e in expected.items()]
    return float(torch.stack(off).max())
