"""Triton kernels for the work of a layer besides its products.

They copy tokens to rows, sum rows, and compute the weighted SwiGLU between an expert's two
products; ``fused_gate`` has those of the gate. Such work is bound by memory bandwidth, so each
kernel reads and writes its data once. Sums run in a fixed order, without atomics, and the host
never waits.

Each function names its equivalent in plain torch. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.kernels.launching import (
    Span,
    contiguous_like,
    launch,
    num_blocks,
    refuse_second_derivative,
    register,
    tile,
)

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch


def gather_rows(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return ``x_TD[token_R]``.

    The two indices must agree: ``token_R[row_TK[t, k]] == t``, each row named once, -1 for a choice
    without a row. The kernel follows ``row_TK``, so that a token is read once; rows that it does
    not name are not written.

    Backward: ``torch.where(row_TK[..., None] >= 0, grad_RD[row_TK], 0).sum(1)``, summed in fp32 in
    the order of K."""
    result: Tensor = _Gather.apply(x_TD, token_R, row_TK)
    return result


def sum_rows(rows_RD: Tensor, row_TK: Tensor, token_R: Tensor) -> Tensor:
    """Return the sum of each token's rows, in fp32 and in the order of K.

    It equals ``torch.where(row_TK[..., None] >= 0, rows_RD[row_TK], 0).sum(1)``, the transpose of
    ``gather_rows`` with the same indices. A token without any row gets zeros. Backward:
    ``grad_TD[token_R]``."""
    result: Tensor = _Sum.apply(rows_RD, row_TK, token_R)
    return result


def weighted_swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    """Return the SwiGLU of each row times the row's weight.

    It equals ``(F.silu(gate) * value * weights_R[:, None]).to(hidden_RH.dtype)`` for ``gate, value
    = hidden_RH.float().chunk(2, -1)``. Only the inputs are kept for the backward pass; the gradient
    of a weight is a sum over its row, in fp32."""
    result: Tensor = _Swiglu.apply(hidden_RH, weights_R)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return _ops.copy_rows(x_TD, row_TK, token_R.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        (row_TK,) = ctx.saved_tensors
        return _ops.sum_rows(grads[0], row_TK), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, row_TK: Tensor, token_R: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(row_TK)
        ctx.rows = rows_RD.shape[0]
        return _ops.sum_rows(rows_RD, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        (row_TK,) = ctx.saved_tensors
        return _ops.copy_rows(grads[0], row_TK, ctx.rows), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RH, weights_R)
        return _ops.swiglu(hidden_RH, weights_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative()
        hidden_RH, weights_R = ctx.saved_tensors
        return _ops.swiglu_backward(grads[0], hidden_RH, weights_R)


def copy_rows(x_TD: Tensor, row_TK: Tensor, rows: int) -> Tensor:
    """Return ``rows`` copies of tokens, without a gradient."""
    x_TD = _with_whole_rows(x_TD)
    row_TK = row_TK.contiguous()
    tokens, width = x_TD.shape
    shape = tile(width, 1024)
    rows_RD = x_TD.new_empty(rows, width)
    grid = (num_blocks(tokens, shape.rows), num_blocks(width, shape.columns))
    tensors = (x_TD, row_TK, rows_RD)
    launch(_copy_kernel, shape, grid, *tensors, tokens, x_TD.stride(0), D=width, K=row_TK.shape[1])
    return rows_RD


def add_rows(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Return the sum of each token's rows, without a gradient."""
    rows_RD = _with_whole_rows(rows_RD)
    row_TK = row_TK.contiguous()
    tokens, top_k = row_TK.shape
    width = rows_RD.shape[1]
    shape = tile(width, 1024)
    x_TD = rows_RD.new_empty(tokens, width)
    grid = (num_blocks(tokens, shape.rows), num_blocks(width, shape.columns))
    tensors = (rows_RD, row_TK, x_TD)
    launch(_sum_kernel, shape, grid, *tensors, tokens, rows_RD.stride(0), D=width, K=top_k)
    return x_TD


def _with_whole_rows(rows_RD: Tensor) -> Tensor:
    """Return rows whose elements follow each other.

    They may be a section of packed rows, which are longer: a copy would cost as much as the kernel."""
    return rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()


def swiglu(hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
    """Return the weighted SwiGLU, without a gradient."""
    output_RH = hidden_RH.new_empty(hidden_RH.shape[0], hidden_RH.shape[1] // 2)
    write_swiglu(hidden_RH.contiguous(), weights_R.contiguous(), output_RH)
    return output_RH


def swiglu_backward(grad_RH: Tensor, hidden_RH: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden rows and weights."""
    gradients = SwigluGradients(contiguous_like(hidden_RH), contiguous_like(weights_R))
    write_swiglu_gradients(grad_RH.contiguous(), hidden_RH.contiguous(), weights_R.contiguous(), gradients)
    return gradients.hidden_RH, gradients.weights_R


def write_swiglu(hidden_RH: Tensor, weights_R: Tensor, output_RH: Tensor, span: Span | None = None) -> None:
    """Write the weighted SwiGLU of all rows, or of those in a span."""
    rows, width = output_RH.shape
    shape = tile(width, 2048)
    grid = (num_blocks(rows, shape.rows), num_blocks(width, shape.columns))
    tensors = (hidden_RH, weights_R, output_RH, *_bounds(span, weights_R))
    launch(_swiglu_kernel, shape, grid, *tensors, rows, H=width, SPAN=span is not None)


@dataclass(frozen=True)
class SwigluGradients:
    """The tensors that the gradients of a weighted SwiGLU are written to.

    The weighted SwiGLU itself is written to ``output_RH``, if given."""

    hidden_RH: Tensor
    weights_R: Tensor
    output_RH: Tensor | None = None


def write_swiglu_gradients(
    grad_RH: Tensor,
    hidden_RH: Tensor,
    weights_R: Tensor,
    gradients: SwigluGradients,
    span: Span | None = None,
) -> None:
    """Write the gradients of all rows, or of those in a span."""
    rows, width = grad_RH.shape
    shape = tile(width, 2048)
    has_output = gradients.output_RH is not None
    output = gradients.output_RH if has_output else grad_RH
    tensors = (grad_RH, hidden_RH, weights_R, gradients.hidden_RH, gradients.weights_R, output)
    grid = (num_blocks(rows, shape.rows), 1)
    constants = {"H": width, "OUTPUT": has_output, "SPAN": span is not None}
    launch(_swiglu_backward_kernel, shape, grid, *tensors, *_bounds(span, weights_R), rows, **constants)


def _bounds(span: Span | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two bounds for a kernel, which reads them only if there is a span."""
    return (unused, unused) if span is None else (span.begin_1, span.end_1)


def _copy_kernel(
    x,
    row_of,
    out,
    tokens,
    stride,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Read each token once and write it to each of its rows."""
    # Offsets of rows are computed in 64 bits: rows times width may exceed 2**31.
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    # The tile stays in registers while it is written to the row of each choice; -1 is a choice without a row.
    values = tl.load(x + token[:, None] * stride + column[None, :], mask=inside)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k, mask=token < tokens, other=-1).to(tl.int64)
        tl.store(out + row[:, None] * D + column[None, :], values, mask=inside & (row >= 0)[:, None])


def _sum_kernel(
    rows,
    row_of,
    out,
    tokens,
    stride,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum the rows of each token, in fp32 and in the order of K."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k, mask=token < tokens, other=-1).to(tl.int64)
        total += tl.load(
            rows + row[:, None] * stride + column[None, :], mask=inside & (row >= 0)[:, None], other=0.0
        ).to(tl.float32)
    tl.store(out + token[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def _swiglu_kernel(
    hidden,
    weights,
    out,
    begin,
    end,
    rows,
    H: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program computes a tile of the output: weight * silu(gate) * value."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row = row < rows
    # The grid covers all rows, because the host does not know the span: programs outside of it do nothing.
    if SPAN:
        has_row = (row >= tl.load(begin)) & (row < tl.load(end))
    inside = has_row[:, None] & (column < H)[None, :]
    # A hidden row has H gates, then H values.
    address = hidden + row[:, None] * (2 * H) + column[None, :]
    gate = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(address + H, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=has_row, other=0.0).to(tl.float32)
    output = gate * tl.sigmoid(gate) * value * weight[:, None]
    tl.store(out + row[:, None] * H + column[None, :], output.to(out.dtype.element_ty), mask=inside)


def _swiglu_backward_kernel(
    grads,
    hidden,
    weights,
    d_hidden,
    d_weights,
    output,
    begin,
    end,
    rows,
    H: tl.constexpr,
    OUTPUT: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program computes whole rows, so that the gradient of a weight needs no second pass."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    has_row = row < rows
    if SPAN:
        has_row = (row >= tl.load(begin)) & (row < tl.load(end))
    weight = tl.load(weights + row, mask=has_row, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, H, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = has_row[:, None] & (column < H)[None, :]
        offset = row[:, None] * (2 * H) + column[None, :]
        grad = tl.load(grads + row[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(hidden + offset, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(hidden + offset + H, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        activated = gate * sigmoid * value
        # The weight multiplies the whole row, so its gradient is the sum of grad * activated over the row.
        d_weight += grad * activated
        # All loads of a tile come before its stores: ``output`` may be the memory of ``grads``, and
        # ``d_hidden`` that of ``hidden``.
        if OUTPUT:
            weighted = (activated * weight[:, None]).to(output.dtype.element_ty)
            tl.store(output + row[:, None] * H + column[None, :], weighted, mask=inside)
        grad *= weight[:, None]
        # The derivative of silu(g) = g * s(g) is s * (1 + g * (1 - s)).
        d_gate = grad * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(d_hidden + offset, d_gate.to(d_hidden.dtype.element_ty), mask=inside)
        tl.store(d_hidden + offset + H, (grad * gate * sigmoid).to(d_hidden.dtype.element_ty), mask=inside)
    tl.store(d_weights + row, tl.sum(d_weight, axis=1).to(d_weights.dtype.element_ty), mask=has_row)


register(
    "copy_rows(Tensor x_TD, Tensor row_TK, SymInt rows) -> Tensor",
    copy_rows,
    lambda x, _, rows: x.new_empty((rows, x.shape[1])),
)
register(
    "sum_rows(Tensor rows_RD, Tensor row_TK) -> Tensor",
    add_rows,
    lambda rows, row_TK: rows.new_empty((row_TK.shape[0], rows.shape[1])),
)
register(
    "swiglu(Tensor hidden_RH, Tensor weights_R) -> Tensor",
    swiglu,
    lambda hidden, _: hidden.new_empty((hidden.shape[0], hidden.shape[1] // 2)),
)
register(
    "swiglu_backward(Tensor grad_RH, Tensor hidden_RH, Tensor weights_R) -> (Tensor, Tensor)",
    swiglu_backward,
    lambda _, hidden, weights: (contiguous_like(hidden), contiguous_like(weights)),
)
_ops: Any = torch.ops.experts
