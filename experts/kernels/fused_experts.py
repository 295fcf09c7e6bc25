"""SwiGLU experts of any sizes from tokens to tokens, in one function.

Only the tokens, the hidden rows before their activation and the routing are kept for the backward
pass. The first product gathers its rows from the tokens. The host never waits: how many rows a size
class has is known to the device alone. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experts.kernels import fused, launching, row_products
from experts.kernels.expert_tables import (
    Rows,
    TiledClass,
    divided,
    gradients_like,
    mark_overwritten,
    new_tables,
    refuse_second_pass,
    results_like,
    tables,
    tiled_classes,
    weight_gradients,
    widest,
)
from experts.kernels.fused import SwigluGradients
from experts.kernels.row_products import SIZE_MULTIPLE, row_product
from experts.types import RowMap


def works(device: torch.device, dtype: torch.dtype, width: int, sizes: Sequence[int]) -> bool:
    """Whether the function supports this device, type and these sizes."""
    fits = all(size % SIZE_MULTIPLE == 0 for size in (width, *sizes))
    return fits and launching.available() and row_products.available(device, dtype)


def experts_fused(
    x_TD: Tensor,
    matrices: Sequence[tuple[Tensor, Tensor]],
    counts_L: Tensor,
    weights_R: Tensor,
    row_map: RowMap,
) -> Tensor:
    """Return the sum of each token's rows: outputs of its experts, times the weights of the rows.

    ``matrices`` are the stacked ``up_EDH`` and ``down_EHD`` of each size class, the smallest first.
    For one class it equals ``sum_rows(experts_grouped(copy_rows(x_TD, row_map), ...), row_map)``.
    There must be a row."""
    flat = [matrix for pair in matrices for matrix in pair]
    rows = Rows(weights_R, counts_L, row_map.row_TK)
    result: Any = _Experts.apply(x_TD, row_map.token_R, *rows, *flat)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, *rows_and_matrices: Tensor) -> Tensor:
        rows, matrices = divided(rows_and_matrices)
        y_TD, hidden = _ops.compute(x_TD, token_R, rows, matrices)
        ctx.save_for_backward(x_TD, hidden, *rows_and_matrices)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        launching.refuse_second_derivative()
        refuse_second_pass(ctx)
        x_TD, hidden, *rows_and_matrices = ctx.saved_tensors
        rows, matrices = divided(rows_and_matrices)
        trains_experts = any(ctx.needs_input_grad[-len(matrices) :])
        passed = (x_TD, hidden, rows, matrices, trains_experts)
        d_x_TD, d_weights_R, d_matrices = _ops.compute_backward(grads[0], *passed)
        d_rows = (d_weights_R, None, None)
        return d_x_TD, None, *d_rows, *(d_matrices if trains_experts else [None] * len(matrices))


def _compute(
    x_TD: Tensor, token_R: Tensor, rows: Sequence[Tensor], matrices: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sums of the tokens' rows, and the hidden rows before their activation."""
    weights_R, counts_L, row_TK = Rows(*rows)
    num_rows = len(token_R)
    x_TD = x_TD.contiguous()
    weights_R = weights_R.contiguous()
    classes = tiled_classes(matrices, counts_L, num_rows)
    hidden = x_TD.new_empty(num_rows * widest(matrices))
    hidden_tables = tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes])
    activated_tables = new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes])
    output_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    for each, hidden_RH, activated_RH in zip(classes, hidden_tables, activated_tables, strict=True):
        row_product(x_TD, each.up_EDH, each.tiles, token_R, hidden_RH)
        fused.write_swiglu(hidden_RH, weights_R, activated_RH, each.span)
        row_product(activated_RH, each.down_EHD, each.tiles, None, output_RD)
    return fused.add_rows(output_RD, row_TK), hidden


def _compute_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: Tensor,
    rows: Sequence[Tensor],
    matrices: Sequence[Tensor],
    trains_experts: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the gradients of tokens and weights, and those of the matrices if they are trained.

    The hidden rows are overwritten: see ``mark_overwritten``."""
    mark_overwritten(hidden)
    weights_R, counts_L, row_TK = Rows(*rows)
    weights_R = weights_R.contiguous()
    num_rows = len(weights_R)
    classes = tiled_classes(matrices, counts_L, num_rows)
    inner_tables = new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes])
    # The backward pass allocates no second set of hidden rows. Gradients overwrite the hidden rows, and the
    # activated rows overwrite their own gradients: the kernel reads each element before it writes it.
    hidden_tables = tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes])
    grad_RD = fused.copy_rows(grad_TD, row_TK, num_rows)
    d_weights_R = torch.zeros_like(weights_R)  # no kernel writes rows after those of the last expert
    for number, each in enumerate(classes):
        # Index the tables instead of naming one: a name would keep its memory after ``clear``.
        _write_hidden_gradients(
            grad_RD, each, inner_tables[number], hidden_tables[number], weights_R, d_weights_R
        )
    d_downs: list[Tensor] = []
    if trains_experts:
        d_downs = weight_gradients(inner_tables, [grad_RD] * len(classes), classes)
    inner_tables.clear()  # each table is freed before the next is allocated
    d_rows_RD = grad_RD  # reuse the memory: the gradient of the second matrix was its last reader
    for each, d_hidden_RH in zip(classes, hidden_tables, strict=True):
        row_product(d_hidden_RH, each.up_EDH.transpose(1, 2), each.tiles, None, d_rows_RD)
    d_x_TD = fused.add_rows(d_rows_RD, row_TK)
    if not trains_experts:
        return d_x_TD, d_weights_R, []
    del grad_RD, d_rows_RD
    # The forward pass gathered these rows within its product. The gradient needs them sorted in memory.
    rows_RD = fused.copy_rows(x_TD, row_TK, num_rows)
    d_ups = weight_gradients([rows_RD] * len(classes), hidden_tables, classes)
    return d_x_TD, d_weights_R, [each for pair in zip(d_ups, d_downs, strict=True) for each in pair]


def _write_hidden_gradients(
    grad_RD: Tensor,
    each: TiledClass,
    inner_RH: Tensor,
    hidden_RH: Tensor,
    weights_R: Tensor,
    d_weights_R: Tensor,
) -> None:
    """Replace the hidden rows of a class by their gradients, and write its activated rows."""
    row_product(grad_RD, each.down_EHD.transpose(1, 2), each.tiles, None, inner_RH)
    gradients = SwigluGradients(hidden_RH, d_weights_R, inner_RH)
    fused.write_swiglu_gradients(inner_RH, hidden_RH, weights_R, gradients, each.span)


launching.register(
    "compute(Tensor x_TD, Tensor token_R, Tensor[] rows, Tensor[] matrices) -> (Tensor, Tensor)",
    _compute,
    results_like,
)
launching.register(
    "compute_backward(Tensor grad_TD, Tensor x_TD, Tensor hidden, Tensor[] rows, Tensor[] matrices, "
    "bool trains_experts) -> (Tensor, Tensor, Tensor[])",
    _compute_backward,
    gradients_like,
)
_ops: Any = torch.ops.experts
