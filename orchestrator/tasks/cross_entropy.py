"""Cross-entropy of a chunk of tokens with its gradient: in plain torch, and as one kernel of a GPU.

The loss is computed in fp32 from logits in the type of the products. Rows may have further columns, up to
P, which belong to no word: they have no part in the loss, and a gradient of zero.

Shapes: C tokens of a chunk, V vocabulary, P columns of the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.kernels import launching
from experts.kernels.launching import Tile, available, launch

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

_TILE = Tile(rows=1, columns=4096, warps=8)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def loss_and_gradient(logits_CP: Tensor, targets_C: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the gradient of their sum by the logits, in the logits' type."""
    fused = available(logits_CP) and not isinstance(logits_CP, FakeTensor)
    compute = loss_and_gradient_fused if fused else loss_and_gradient_plain
    return compute(logits_CP, targets_C, vocabulary)


def held_bytes(logits_CP: Tensor, vocabulary: int) -> int:
    """Return the most bytes that ``loss_and_gradient`` holds at once, those of the logits among them."""
    if launching.available(logits_CP):  # the kernel writes the gradient in the logits' place
        return logits_CP.nbytes
    wide_bytes = logits_CP.numel() * wide_dtype(logits_CP.dtype).itemsize
    is_padded = logits_CP.shape[1] > vocabulary
    # Beside the logits: their softmax, and a wide copy of narrow logits or a padded gradient of wide ones.
    copies = 2 if is_padded or logits_CP.dtype != wide_dtype(logits_CP.dtype) else 1
    return logits_CP.nbytes + copies * wide_bytes


def loss_and_gradient_plain(logits_CP: Tensor, targets_C: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Compute in plain torch."""
    log_CV = logits_CP[:, :vocabulary].to(wide_dtype(logits_CP.dtype)).log_softmax(-1)
    targets_C1 = targets_C.unsqueeze(1)
    loss_C = -log_CV.gather(1, targets_C1).squeeze(1)
    d_logits_CV = log_CV.exp_()
    d_logits_CV.scatter_add_(1, targets_C1, -torch.ones_like(loss_C).unsqueeze(1))
    d_logits_CV = d_logits_CV.to(logits_CP.dtype)
    padding = logits_CP.shape[1] - vocabulary
    return loss_C, F.pad(d_logits_CV, (0, padding)) if padding else d_logits_CV  # padding by none copies


def loss_and_gradient_fused(logits_CP: Tensor, targets_C: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Compute in one kernel, which writes the gradient in the logits' place."""
    tokens, columns = logits_CP.shape
    loss_C = logits_CP.new_empty(tokens, dtype=torch.float32)
    targets_C = targets_C.contiguous()
    launch(_loss_kernel, _TILE, (tokens, 1), logits_CP, targets_C, loss_C, V=vocabulary, P=columns)
    return loss_C, logits_CP


def _loss_kernel(
    logits,
    targets,
    loss,
    V: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    """One program computes one token: the sum of exponentials first, then the gradient."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * P
    target = tl.load(targets + token)
    at_target = tl.load(row + target).to(tl.float32)
    top = float("-inf")
    total = 0.0
    # All columns are loaded: a mask that ends within eight of them would divide the loads of 16 bytes.
    for first in range(0, V, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(row + column, mask=column < P, other=0.0).to(tl.float32)
        x = tl.where(column < V, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
    log_total = top + tl.log(total)
    tl.store(loss + token, log_total - at_target)
    for first in range(0, P, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < P
        x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_total) - (column == target).to(tl.float32)
        gradient = tl.where(column < V, gradient, 0.0)
        tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=inside)
