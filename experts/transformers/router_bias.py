"""The bias that routers of some families add to their scores: for the choice of experts, not for weights.

DeepSeek-V3, GLM-4 MoE and others have it in the router, MiniMax-M2 in the block around it. See
``experts.types`` for the letters of shapes."""

from __future__ import annotations

from typing import Any

from torch import nn

from experts.transformers.hosted import HostedExperts, RouterBias

_NAMES = ("e_score_correction_bias", "expert_bias")


def has_router_biases(model: nn.Module) -> bool:
    """Return whether ``use_balance_bias`` takes a model: each of its routers has a bias."""
    layers = _layers(model)
    return bool(layers) and all(_find_bias(model, name, layer, 0.0) for name, layer in layers)


def use_balance_bias(model: nn.Module, rate: float) -> None:
    """Let ``experts.balance.update_balance`` move the routers' biases by ``rate`` in each step.

    Call it after ``use``. A model with a router that has no such bias is refused."""
    layers = _layers(model)
    biases = [_find_bias(model, name, layer, rate) for name, layer in layers]
    without = [name for (name, _), bias in zip(layers, biases, strict=True) if bias is None]
    if without or not layers:
        where = without[0].removesuffix(".hosted") if without else "it has no layer of our experts"
        raise ValueError(
            f"{type(model).__name__} has no routing bias that could balance its experts ({where}). Families "
            "such as DeepSeek-V3, GLM-4 MoE and MiniMax-M2 have one; others balance by an auxiliary loss"
        )
    for (_, layer), bias in zip(layers, biases, strict=True):
        layer.router_bias = bias


def _layers(model: nn.Module) -> list[tuple[str, HostedExperts]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, HostedExperts)]


def _find_bias(model: nn.Module, name: str, layer: HostedExperts, rate: float) -> RouterBias | None:
    """Return the bias in the block of a layer: the module around ``experts.hosted``."""
    block_name = name.rpartition(".")[0].rpartition(".")[0]
    block: Any = model.get_submodule(block_name)
    for owner in block.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            if key in _NAMES and buffer.shape == layer.load_E.shape:
                return RouterBias(owner, key, rate)
    return None
