"""Initial weights as a function of (seed, name, expert id): the same on every device, host and placement."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from experts.bank import ExpertBank
from experts.gate import Gate


def mix(*parts: object) -> int:
    """A seed of 63 bits from anything that prints, alike on every machine and Python."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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
    if target.device.type == "meta":
        return
    generator = torch.Generator().manual_seed(seed)
    target.copy_(torch.empty(target.shape).normal_(0.0, std, generator=generator))
