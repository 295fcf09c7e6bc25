"""Cross-entropy of a chunk of tokens with its gradient: in plain torch, and as one kernel of a GPU.

The loss is computed in fp32 from logits in the type of the products.

Shapes: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from experts.kernels.launching import Tile, available, launch

if TYPE_CHECKING:
    import triton.language as tl  # pyright: ignore[reportMissingImports]
else:
    tl = None  # until the first launch

_TILE = Tile(rows=1, columns=4096, warps=8)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def loss_and_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the gradient of their sum by the logits, in the logits' type."""
    fused = available(logits_CV) and not isinstance(logits_CV, FakeTensor)
    compute = loss_and_gradient_fused if fused else loss_and_gradient_plain
    return compute(logits_CV, targets_C)


def loss_and_gradient_plain(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute in plain torch."""
    log_CV = logits_CV.to(wide_dtype(logits_CV.dtype)).log_softmax(-1)
    targets_C1 = targets_C.unsqueeze(1)
    loss_C = -log_CV.gather(1, targets_C1).squeeze(1)
    d_logits_CV = log_CV.exp_()
    d_logits_CV.scatter_add_(1, targets_C1, -torch.ones_like(loss_C).unsqueeze(1))
    return loss_C, d_logits_CV.to(logits_CV.dtype)


def loss_and_gradient_fused(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute in one kernel, which writes the gradient in the logits' place."""
    tokens, vocabulary = logits_CV.shape
    loss_C = logits_CV.new_empty(tokens, dtype=torch.float32)
    targets_C = targets_C.contiguous()
    launch(_loss_kernel, _TILE, (tokens, 1), logits_CV, targets_C, loss_C, V=vocabulary)
    return loss_C, logits_CV


def _loss_kernel(
    logits,
    targets,
    loss,
    V: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    """One program computes one token: the sum of exponentials first, then the gradient."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * V
    target = tl.load(targets + token)
    at_target = tl.load(row + target).to(tl.float32)
    top = float("-inf")
    total = 0.0
    for first in range(0, V, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
    log_total = top + tl.log(total)
    tl.store(loss + token, log_total - at_target)
    for first in range(0, V, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < V
        x = tl.load(row + column, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - log_total) - (column == target).to(tl.float32)
        tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=inside)
