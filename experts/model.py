"""A model with MoE layers as a whole: its initial weights, a function of (seed, name, expert id) that is the same on every
device, host and placement; and where its experts live."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.balance import moe_layers
from experts.bank import ExpertBank
from experts.context import MoEContext
from experts.gate import Gate


def mix(*parts: object) -> int:
    """A seed of 63 bits from anything that prints, alike on every machine and Python."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def attach(model: nn.Module, context: MoEContext) -> None:
    """Let the MoE layers of a model know of the step and of the other hosts."""
    for name, layer in moe_layers(model):
        layer.context = context
        layer.number = mix("layer", name) >> 20


def place(model: nn.Module, host_of: Sequence[Sequence[int]], rank: int) -> None:
    """Keep the experts that live on this host, layer by layer; ``host_of`` names the host of each expert. To be done before
    anyone holds on to the parameters."""
    layers = moe_layers(model)
    if len(host_of) != len(layers):
        raise ValueError(
            f"a placement of {len(host_of)} layers was given; the model has {len(layers)} MoE layers"
        )
    parts: dict[ExpertBank, tuple[ExpertBank, tuple[int, ...]]] = {}
    for (name, layer), hosts in zip(layers, host_of, strict=True):
        if len(hosts) != len(layer.load_E):
            raise ValueError(f"{name}: {len(hosts)} experts were placed; the layer has {len(layer.load_E)}")
        layer.host_E = torch.tensor(list(hosts), dtype=torch.int64, device=layer.host_E.device)
        if layer.bank not in parts:
            parts[layer.bank] = (
                layer.bank.part([expert for expert, host in enumerate(hosts) if host == rank]),
                tuple(hosts),
            )
        kept, where = parts[layer.bank]
        if where != tuple(hosts):
            raise ValueError(f"{name} shares its experts with another layer; they cannot live in two places")
        layer.bank = kept


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter in place: weights normal with variance 1 / fan-in, embeddings 0.02, norms one, biases zero."""
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertBank):
            for group, role, stack in module.stacks():
                for expert, weight in zip(group.ids, stack.unbind(), strict=True):
                    _normal(weight, weight.shape[0] ** -0.5, mix(seed, prefix, expert, role))
        else:
            for name, parameter in module.named_parameters(recurse=False):
                _fill(module, name, parameter, mix(seed, prefix, name))


def _fill(module: nn.Module, name: str, parameter: Tensor, seed: int) -> None:
    if parameter.ndim < 2:
        parameter.fill_(0.0 if name == "bias" else 1.0)
    elif isinstance(module, nn.Embedding | Gate):
        _normal(parameter, 0.02, seed)
    else:
        _normal(parameter, parameter[0].numel() ** -0.5, seed)


def _normal(target: Tensor, std: float, seed: int) -> None:
    """Drawn on the CPU, so that a GPU run begins with the same weights."""
    if target.device.type == "meta" or isinstance(target, FakeTensor):  # there is nothing to fill
        return
    generator = torch.Generator().manual_seed(seed)
    target.copy_(torch.empty(target.shape).normal_(0.0, std, generator=generator))
