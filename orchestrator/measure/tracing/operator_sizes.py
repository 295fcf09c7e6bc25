"""The arithmetic of attention and of convolutions, from the arguments of torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from orchestrator.plan.cost.ops import AttentionOp, ProductOp

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_ATTENTION = "_scaled_dot_product"  # begins the names of fused attention on any device
_MASKS = ("attn_mask", "attn_bias")
_FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def is_attention(name: str) -> bool:
    """Whether an operator of this name is fused attention, forward or backward."""
    return name.startswith(_ATTENTION)


def attention_op(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionOp:
    """Return the arithmetic of a call of fused attention."""
    arguments = _by_name(operator, args, kwargs)
    mask = next((arguments[name] for name in _MASKS if arguments.get(name) is not None), None)
    is_causal = bool(arguments.get("is_causal"))
    op = attention_of(arguments["query"], arguments["value"], mask, is_causal)
    return replace(op, backward="backward" in operator._schema.name)


def attention_of(query: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> AttentionOp:
    """Return the arithmetic of fused attention, forward.

    A mask over as many keys as queries counts as a causal one, unless it is the same for all queries: its
    values are not known here, and transformers makes one in every trace, also where it would compute
    without one."""
    batch, heads, length, width = query.shape
    keys, value_width = value.shape[-2:]
    if mask is not None and keys == length and _differs_by_query(mask):
        is_causal = True
    return AttentionOp(
        heads=batch * heads,
        pairs=_causal_pairs(length, keys) if is_causal else length * keys,
        width=width,
        precision=PRECISIONS[query.dtype],
        value_width=value_width if value_width != width else None,
    )


def _differs_by_query(mask: Tensor) -> bool:
    """Whether a mask has a row for each query; one that hides padding has a single row for all."""
    return mask.shape[-2] > 1 and mask.stride(-2) > 0


def _causal_pairs(length: int, keys: int) -> float:
    """Return the pairs below the diagonal, which begins at the first query and the first key."""
    square = min(length, keys)
    return square**2 / 2 + (length - square) * keys


def convolution_ops(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> list[ProductOp]:
    """Return the product of a convolution, or those of the gradients that its backward pass computes."""
    arguments = _by_name(operator, args, kwargs)
    source: Tensor = arguments["input"]
    weight: Tensor = arguments["weight"]
    groups = arguments["groups"]
    if arguments["transposed"]:
        positions = _positions(source)
        inner, outer = len(weight) // groups, weight[0].numel()
    else:
        positions = _positions(arguments.get("grad_output", output))
        inner, outer = weight[0].numel(), len(weight) // groups
    # Groups are one product: a kernel computes them together.
    rows = positions * groups
    precision = PRECISIONS[weight.dtype]
    if "output_mask" not in arguments:
        return [ProductOp(rows, inner, outer, "conv", precision=precision)]
    of_source, of_weight, _ = arguments["output_mask"]
    ops = []
    if of_source:
        ops.append(ProductOp(rows, outer, inner, "conv", precision=precision))
    if of_weight:
        ops.append(ProductOp(inner, rows, outer, "conv", precision=precision))
    return ops


def _positions(images: Tensor) -> int:
    """Return the positions of all images, without their channels."""
    return images.shape[0] * prod(images.shape[2:])


def _by_name(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def attention_formulas() -> dict[Any, Callable[..., float]]:
    """Return the FLOP of fused attention for torch's counter.

    Its own formulas count all pairs of causal attention, and none on a CPU."""
    packets = [getattr(torch.ops.aten, name) for name in _FORWARD]
    return {packet: _formula(packet) for packet in packets}


def _formula(packet: Any) -> Callable[..., float]:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> float:
        del out_val
        return attention_op(packet.default, args, kwargs).flops

    flops._get_raw = True  # the counter passes tensors, not shapes  # pyrefly: ignore[missing-attribute]
    return flops
