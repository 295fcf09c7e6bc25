"""Load balance of the experts.

The counts of a step are the weights of the next step's balance loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experts.moe.layer import MoELayer
from experts.moe.routed import RoutedExperts


def moe_layers(model: nn.Module) -> list[tuple[str, RoutedExperts]]:
    """Return the MoE layers of a model with their names, in the order of its definition."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, RoutedExperts)]


def gated_layers(model: nn.Module) -> list[tuple[str, MoELayer]]:
    """Return the MoE layers that have a gate of ours."""
    return [(name, layer) for name, layer in moe_layers(model) if isinstance(layer, MoELayer)]


@torch.no_grad()
def update_balance(model: nn.Module, loads: Sequence[Tensor], finite: Tensor | None = None) -> None:
    """Store the counts of an optimizer step for the next balance loss, and move the routers' biases.

    ``loads`` are the tokens per expert of each MoE layer, summed over the step. A bias moves up for
    experts that had fewer tokens than the mean, and down for those that had more. Where ``finite`` is
    false the step was skipped, and changes neither: a pass that overflowed may have routed at random."""
    layers = moe_layers(model)
    if len(loads) != len(layers):
        raise ValueError(
            f"the step counted the loads of {len(loads)} MoE layers; the model has {len(layers)}"
        )
    for (_, layer), counts_E in zip(layers, loads, strict=True):
        if finite is not None:
            skipped_E = layer.load_E.to(counts_E)
            layer.load_E.copy_(torch.where(finite, counts_E, skipped_E))
            # Equal counts move no bias.
            layer.move_bias(torch.where(finite, counts_E, 0))
        else:
            layer.load_E.copy_(counts_E)
            layer.move_bias(counts_E)
