"""Cross-entropy of an output layer over a large vocabulary, in chunks of tokens.

The logits of all tokens are never in memory at once: those of a chunk give its losses and, at once, the
gradients of its hidden states and of the output matrix. The loss is computed in fp32 from logits in the type
of the products.

Shapes: T tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from experts.bank import computing_dtype
from experts.kernels.autocast import without_autocast
from experts.kernels.fused import Tile, available, launch

if TYPE_CHECKING:
    import triton.language as tl  # pyright: ignore[reportMissingImports]
else:
    tl = None  # until the first launch

LARGE_LOGITS = 2**26
"""Logits from which on chunks save more memory (256 MiB in fp32) than they cost."""
CHUNK_LOGITS = 2**27
_ROW_MULTIPLE = 128  # of the tokens of a chunk, for full tiles of its products
_TILE = Tile(rows=1, columns=4096, warps=8)


class TokenLoss(NamedTuple):
    """The sum of the tokens' losses, and the number of tokens whose best guess is right.

    The number is None in training: it costs a pass over all logits."""

    sum: Tensor
    num_correct: Tensor | None


def has_large_logits(hidden_TD: Tensor, vocabulary: int) -> bool:
    """Whether the loss of so many tokens should be computed in chunks.

    Not in fp16, where gradients are scaled before they are rounded."""
    num_logits = hidden_TD.shape[0] * vocabulary
    return num_logits >= LARGE_LOGITS and computing_dtype(hidden_TD) != torch.float16


def token_loss(hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor) -> TokenLoss:
    """Return the cross-entropy of ``hidden_TD @ output_VD.T`` against the targets, as a sum.

    Each target must be a row of ``output_VD``: none is ignored."""
    dtype = computing_dtype(hidden_TD)
    with without_autocast(hidden_TD):
        if torch.is_grad_enabled():
            total: Tensor = _TokenLoss.apply(hidden_TD, output_VD, targets_T, dtype)  # pyright: ignore[reportAssignmentType]
            return TokenLoss(total, None)
        return _loss_without_gradients(hidden_TD.to(dtype), output_VD.to(dtype), targets_T)


def _loss_without_gradients(hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor) -> TokenLoss:
    total = hidden_TD.new_zeros((), dtype=wide_dtype(hidden_TD.dtype))
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
    for hidden_CD, targets_C in _chunks(hidden_TD, output_VD, targets_T):
        logits_CV = hidden_CD @ output_VD.T
        num_correct += (logits_CV.argmax(-1) == targets_C).sum()
        total += F.cross_entropy(logits_CV.to(total.dtype), targets_C, reduction="sum")
    return TokenLoss(total, num_correct)


class _TokenLoss(torch.autograd.Function):
    """Computes the gradients with the loss; the backward pass multiplies them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor, dtype: torch.dtype
    ) -> Tensor:
        # A compiler would move the gradients to the backward pass, and keep all logits until then.
        compute = _opaque_gradients if torch.compiler.is_compiling() else _gradients
        is_trained = output_VD.requires_grad
        total, d_hidden_TD, d_output_VD = compute(
            hidden_TD.to(dtype), output_VD.to(dtype), targets_T, is_trained
        )
        ctx.save_for_backward(d_hidden_TD, d_output_VD)
        ctx.dtypes = hidden_TD.dtype, output_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        d_hidden_TD, d_output_VD = ctx.saved_tensors
        hidden_dtype, output_dtype = ctx.dtypes
        d_hidden_TD = (d_hidden_TD * grads[0]).to(hidden_dtype)
        if not ctx.needs_input_grad[1]:
            return d_hidden_TD, None, None, None
        return d_hidden_TD, (d_output_VD * grads[0]).to(output_dtype), None, None


def _gradients(
    hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor, is_trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and its gradients by the hidden states and by the output matrix.

    The latter is empty unless the output matrix ``is_trained``: beside adapters it is frozen."""
    wide = wide_dtype(hidden_TD.dtype)
    total = hidden_TD.new_zeros((), dtype=wide)
    d_hidden_CDs: list[Tensor] = []
    # Chunks are summed in full: each of them is rounded once, as the gradient of all tokens would be.
    d_output_VD = _empty_gradient(output_VD, is_trained).zero_()
    for hidden_CD, targets_C in _chunks(hidden_TD, output_VD, targets_T):
        loss_C, d_logits_CV = loss_and_gradient(hidden_CD @ output_VD.T, targets_C)
        total += loss_C.sum()
        d_hidden_CDs.append(d_logits_CV @ output_VD)
        if is_trained:
            d_output_VD += d_logits_CV.T @ hidden_CD
    return total, torch.cat(d_hidden_CDs), d_output_VD


@torch.library.custom_op("orchestrator::token_loss", mutates_args=())
def _opaque_gradients(
    hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor, is_trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(hidden_TD, output_VD, targets_T, is_trained)


@_opaque_gradients.register_fake
def _(
    hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor, is_trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del targets_T
    total = hidden_TD.new_empty((), dtype=wide_dtype(hidden_TD.dtype))
    return total, torch.empty_like(hidden_TD), _empty_gradient(output_VD, is_trained)


def _empty_gradient(output_VD: Tensor, is_trained: bool) -> Tensor:
    """Return memory for the gradient of the output matrix: none if it is frozen."""
    wide = wide_dtype(output_VD.dtype)
    return torch.empty_like(output_VD, dtype=wide) if is_trained else output_VD.new_empty(0, dtype=wide)


def _chunks(hidden_TD: Tensor, output_VD: Tensor, targets_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = chunk_size(output_VD.shape[0])
    yield from zip(hidden_TD.split(size), targets_T.split(size), strict=True)


def chunk_size(vocabulary: int) -> int:
    """Return the tokens of a chunk."""
    size = CHUNK_LOGITS // vocabulary
    return max(1, size // _ROW_MULTIPLE * _ROW_MULTIPLE or size)


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
