"""Initial weights and expert placement of models with MoE layers.

Initial weights are a function of (seed, name, expert id), the same on every device, host and
placement."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.balance import moe_layers
from experts.kernels.adapters import is_first_factor
from experts.moe.bank import MATRICES, ExpertBank
from experts.moe.context import MoEContext
from experts.moe.gate import Gate
from experts.moe.token_dropout import token_dropouts
from experts.structure import Expert, LayerStructure


def mix(*parts: object) -> int:
    """Hash printable values to a seed of 63 bits, the same on every machine and Python."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def attach(model: nn.Module, context: MoEContext) -> None:
    """Share a context among the MoE layers and dropouts of a model, and number them by their names."""
    for name, dropout in token_dropouts(model):
        dropout.context = context
        dropout.layer_id = mix("dropout", name) >> 20
    for name, layer in moe_layers(model):
        layer.context = context
        # 43 bits, so that a seed plus a layer's id stays within int64.
        layer.layer_id = mix("layer", name) >> 20
        layer.layer_name = name
        layer.structure = replace(layer.structure, name=name)


def place(model: nn.Module, host_of: Sequence[Sequence[int]], rank: int) -> None:
    """Keep only the experts of this host. ``host_of`` is the host of each expert, layer by layer."""
    layers = moe_layers(model)
    if len(host_of) != len(layers):
        raise ValueError(
            f"a placement of {len(host_of)} layers was given; the model has {len(layers)} MoE layers"
        )
    structures: list[LayerStructure] = []
    for (name, layer), hosts in zip(layers, host_of, strict=True):
        if len(hosts) != len(layer.load_E):
            raise ValueError(f"{name}: {len(hosts)} experts were placed; the layer has {len(layer.load_E)}")
        structures.append(LayerStructure.initial(name, layer.bank.sizes, hosts))
    num_hosts = 1 + max([rank, *(host for hosts in host_of for host in hosts)])
    place_structure(model, structures, rank, num_hosts)


def place_structure(
    model: nn.Module, structures: Sequence[LayerStructure], rank: int, num_hosts: int
) -> None:
    """Keep only the experts that this host has a copy of.

    The layers have the experts of ``structures`` already. Banks are replaced, so that it must run
    before an optimizer or a strategy takes the parameters."""
    # Layers may share a bank: it is cut once, and its layers need one placement.
    placed_banks: dict[ExpertBank, tuple[ExpertBank, tuple[Expert, ...]]] = {}
    for (name, layer), structure in zip(moe_layers(model), structures, strict=True):
        if layer.bank not in placed_banks:
            local_bank = layer.bank.part(structure.held(rank))
            placed_banks[layer.bank] = (local_bank, structure.experts)
        local_bank, placed = placed_banks[layer.bank]
        if placed != structure.experts:
            raise ValueError(f"{name} shares its experts with another layer; they cannot live in two places")
        layer.bank = local_bank
        layer.use_structure(structure, (rank, num_hosts))


def structure_of(model: nn.Module) -> list[LayerStructure]:
    """Return the experts of each MoE layer as they are now."""
    return [replace(layer.structure, name=name) for name, layer in moe_layers(model)]


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter in place.

    Weights are normal with variance 1 / fan-in, embeddings with a standard deviation of 0.02, norms
    one, biases zero. Adapters start as ``fill_adapter`` says."""
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            initialise_experts(module, prefix, module.form.roles, seed)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                _fill(module, name, parameter, mix(seed, prefix, name))


@torch.no_grad()
def initialise_experts(bank: ExpertBank, prefix: str, roles: Sequence[str], seed: int) -> None:
    """Fill some parameters of a bank's experts. ``prefix`` is the bank's name."""
    adapter_roles = bank.form.adapters.roles if bank.form.adapters else ()
    for group, role, stack in bank.stacks():
        if role not in roles:
            continue
        for row, weight in zip(group.rows, stack.unbind(), strict=True):
            role_seed = mix(seed, prefix, bank.ids[row], role)
            if role in adapter_roles:
                fill_adapter(weight, weight.shape[0] if is_first_factor(role) else None, role_seed)
            else:
                fill_normal(weight, weight.shape[0] ** -0.5 if role in MATRICES else 0.0, role_seed)


def _fill(module: nn.Module, name: str, parameter: Tensor, seed: int) -> None:
    if parameter.ndim < 2:
        parameter.fill_(0.0 if name == "bias" else 1.0)
    elif isinstance(module, nn.Embedding | Gate):
        fill_normal(parameter, 0.02, seed)
    else:
        fill_normal(parameter, parameter[0].numel() ** -0.5, seed)


def fill_normal(target: Tensor, std: float, seed: int) -> None:
    """Fill with numbers drawn on the CPU, so that a run on GPUs starts from the same weights."""
    if target.device.type == "meta" or isinstance(target, FakeTensor):  # there is no memory to fill
        return
    generator = torch.Generator().manual_seed(seed)
    target.copy_(torch.empty(target.shape).normal_(0.0, std, generator=generator))


@torch.no_grad()
def fill_adapter(target: Tensor, fan_in: int | None, seed: int) -> None:
    """Fill one matrix of an adapter, as PEFT does: uniform within 1 / √fan-in.

    The second of the two has no ``fan_in``: it is zero, so that the adapter changes nothing at first."""
    if target.device.type == "meta" or isinstance(target, FakeTensor):
        return
    if fan_in is None:
        target.zero_()
        return
    bound = fan_in**-0.5
    generator = torch.Generator().manual_seed(seed)
    target.copy_(torch.empty(target.shape).uniform_(-bound, bound, generator=generator))
