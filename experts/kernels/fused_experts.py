"""SwiGLU experts from tokens to tokens in one function.

Only the tokens, the hidden rows before their activation and the routing are kept for the backward
pass. The first product gathers its rows from the tokens. See ``experts.types`` for the letters of
shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import fused, row_products
from experts.kernels.row_products import SIZE_MULTIPLE, RowTiles, row_product
from experts.types import RowMap


def works(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether the function supports this device, type and these sizes."""
    fits = width % SIZE_MULTIPLE == 0 and hidden % SIZE_MULTIPLE == 0
    return fits and fused.available() and row_products.available(device, dtype)


def experts_fused(
    x_TD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    counts_E: Tensor,
    weights_R: Tensor,
    row_map: RowMap,
) -> Tensor:
    """Return the sum of each token's rows: outputs of its experts, times the weights of the rows.

    It equals ``sum_rows(experts_grouped(copy_rows(x_TD, row_map), ...), row_map)``. There must be
    a row."""
    routing = (counts_E, row_map.token_R, row_map.row_TK)
    result: Any = _Experts.apply(x_TD, up_EDH, down_EHD, weights_R, *routing)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        up_EDH: Tensor,
        down_EHD: Tensor,
        weights_R: Tensor,
        counts_E: Tensor,
        token_R: Tensor,
        row_TK: Tensor,
    ) -> Tensor:
        inputs = (x_TD, up_EDH, down_EHD, weights_R, counts_E)
        y_TD, hidden_RH = _ops.compute(*inputs, token_R, row_TK)
        ctx.save_for_backward(*inputs, row_TK, hidden_RH)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trains_experts = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        d_x, d_up, d_down, d_weights = _ops.compute_backward(grads[0], *ctx.saved_tensors, trains_experts)
        of_experts = (d_up, d_down) if trains_experts else (None, None)
        return d_x, *of_experts, d_weights, None, None, None


def _compute(
    x_TD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    weights_R: Tensor,
    counts_E: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sums of the tokens' rows, and the hidden rows before their activation."""
    tiles = RowTiles.of(counts_E, len(token_R))
    hidden_RH = row_product(x_TD.contiguous(), up_EDH, tiles, token_R)
    output_RD = row_product(fused.swiglu(hidden_RH, weights_R), down_EHD, tiles)
    return fused.add_rows(output_RD, row_TK), hidden_RH


def _compute_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    weights_R: Tensor,
    counts_E: Tensor,
    row_TK: Tensor,
    hidden_RH: Tensor,
    trains_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, both matrices and weights."""
    num_rows = len(hidden_RH)
    tiles = RowTiles.of(counts_E, num_rows)
    grad_RD = fused.copy_rows(grad_TD, row_TK, num_rows)
    grad_RH = row_product(grad_RD, down_EHD.transpose(1, 2), tiles)
    activated_RH = torch.empty_like(grad_RH)
    d_hidden_RH, d_weights_R = fused.swiglu_backward(grad_RH, hidden_RH, weights_R, activated_RH)
    d_x_TD = fused.add_rows(row_product(d_hidden_RH, up_EDH.transpose(1, 2), tiles), row_TK)
    if not trains_experts:
        empty = grad_RD.new_empty(0)
        return d_x_TD, empty, empty.clone(), d_weights_R
    d_down_EHD = F.grouped_mm(activated_RH.t(), grad_RD, offs=tiles.ends_E)
    rows_RD = fused.copy_rows(x_TD, row_TK, num_rows)
    d_up_EDH = F.grouped_mm(rows_RD.t(), d_hidden_RH, offs=tiles.ends_E)
    return d_x_TD, d_up_EDH, d_down_EHD, d_weights_R


def _shapes_of_gradients(
    grad_TD: Tensor,
    x_TD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    weights_R: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    trains_experts = rest[-1]
    empty = grad_TD.new_empty(0)
    of_experts = (up_EDH, down_EHD) if trains_experts else (empty, empty)
    return tuple(torch.empty_like(tensor) for tensor in (x_TD, *of_experts, weights_R))


_INPUTS = "Tensor x_TD, Tensor up_EDH, Tensor down_EHD, Tensor weights_R, Tensor counts_E"
fused.register(
    f"compute({_INPUTS}, Tensor token_R, Tensor row_TK) -> (Tensor, Tensor)",
    _compute,
    lambda x, up, _, __, ___, token, ____: (
        torch.empty_like(x),
        x.new_empty((token.shape[0], up.shape[2])),
    ),
)
fused.register(
    f"compute_backward(Tensor grad_TD, {_INPUTS}, Tensor row_TK, Tensor hidden_RH, bool trains_experts) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    _shapes_of_gradients,
)
_ops: Any = torch.ops.experts
