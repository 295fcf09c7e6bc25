"""How the experts are used: counts per layer, summed over a step by whoever runs it, and handed back at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experts.layer import MoELayer


def moe_layers(model: nn.Module) -> list[tuple[str, MoELayer]]:
    """The MoE layers of a model, in the order of its definition."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoELayer)]


@torch.no_grad()
def update_balance(model: nn.Module, loads: Sequence[Tensor]) -> None:
    """At the end of an optimizer step: its counts become the ones the next step's balance loss is weighed by, and the gates'
    biases move towards the experts that had too few tokens."""
    layers = moe_layers(model)
    if len(loads) != len(layers):
        raise ValueError(
            f"the step counted the loads of {len(loads)} MoE layers; the model has {len(layers)}"
        )
    for (_, layer), counts_E in zip(layers, loads, strict=True):
        layer.load_E.copy_(counts_E)
        gate = layer.gate
        if gate.bias_rate:
            gate.bias_E += gate.bias_rate * torch.sign(counts_E.sum() - counts_E * len(counts_E)).to(
                gate.bias_E.dtype
            )
