"""Activation checkpointing of a model's repeated blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from experts.moe.context import MoEContext, RecomputeCache
from experts.moe.routed import RoutedExperts
from orchestrator.errors import UserError


def recompute_blocks(model: nn.Module, context: MoEContext | None) -> int:
    """Apply activation checkpointing to the repeated blocks of a model, in place; return their
    number.

    A block keeps its inputs only and runs again in the backward pass. Results of the token exchange
    are kept too, in a cache of ``context``: a recomputed pass neither routes nor sends tokens
    again. ``context`` is None where the compiler decides what to keep. Parameter names stay.
    """
    blocks = [block for blocks in block_lists(model) for block in blocks]
    if not blocks:
        raise UserError(
            "activation checkpointing needs repeated blocks (an nn.ModuleList or nn.Sequential of two or "
            "more modules of one class); this model has none: use --activation-checkpointing off"
        )
    for block in blocks:
        forward: Any = block.forward
        has_moe_layer = any(isinstance(module, RoutedExperts) for module in block.modules())
        options: dict[str, Any] = {}
        if has_moe_layer and context is not None:
            options["context_fn"] = partial(_recompute_contexts, context)
        block.forward = partial(checkpoint, forward, use_reentrant=False, **options)
    return len(blocks)


def _recompute_contexts(
    context: MoEContext,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's first pass and of its recomputation; they share a cache."""
    cache = RecomputeCache()
    return cache.recording(context), cache.replaying(context)


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Return the outermost lists of blocks of one class; lists inside a block are not searched."""
    lists: list[list[nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(module.children())
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if alike and any(True for _ in children[0].parameters()):
            lists.append(children)
            inside = (*inside, f"{name}." if name else "")
    return lists
