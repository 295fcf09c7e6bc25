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
from experts.bank import BIASES, ExpertBank
from experts.context import MoEContext
from experts.gate import Gate
from experts.structure import Expert, LayerStructure


def mix(*parts: object) -> int:
    """Hash printable values to a seed of 63 bits, the same on every machine and Python."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def attach(model: nn.Module, context: MoEContext) -> None:
    """Share a context among the MoE layers of a model, and number the layers by their names."""
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
    one, biases zero."""
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            for group, role, stack in module.stacks():
                for row, weight in zip(group.rows, stack.unbind(), strict=True):
                    expert_id = module.ids[row]
                    std = 0.0 if role in BIASES else weight.shape[0] ** -0.5
                    fill_normal(weight, std, mix(seed, prefix, expert_id, role))
        else:
            for name, parameter in module.named_parameters(recurse=False):
                _fill(module, name, parameter, mix(seed, prefix, name))


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
