"""SwiGLU experts of any sizes from tokens to tokens, with products in fp8.

It is ``fused_experts`` but for the operands of four of its six products: outputs and gradients of rows are
computed in fp8, with a scale for each row and each column. Gradients of weights, which sum over rows of
different scales, stay in bf16, and so do all tensors that are kept or returned.

Weights are quantised in each pass. They change once per optimizer step only: micro-batches repeat it. See
``experts.types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experts.kernels import fp8, fused, fused_experts, launching
from experts.kernels.expert_tables import (
    Rows,
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
from experts.kernels.fp8 import Quantised, quantise, quantise_transposed, row_product
from experts.kernels.fused import SwigluGradients
from experts.types import RowMap


def works(device: torch.device, dtype: torch.dtype, width: int, sizes: Sequence[int]) -> bool:
    """Whether the function supports this device, type and these sizes."""
    return dtype == torch.bfloat16 and fused_experts.works(device, dtype, width, sizes)


def experts_fp8(
    x_TD: Tensor,
    matrices: Sequence[tuple[Tensor, Tensor]],
    counts_L: Tensor,
    weights_R: Tensor,
    row_map: RowMap,
) -> Tensor:
    """Return the sum of each token's rows, as ``experts_fused`` does with products in bf16.

    Tokens and matrices are bf16. There must be a row."""
    flat = [matrix for pair in matrices for matrix in pair]
    rows = Rows(weights_R, counts_L, row_map.row_TK)
    result: Any = _Experts.apply(x_TD, row_map.token_R, *rows, *flat)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, *rows_and_matrices: Tensor) -> Tensor:
        rows, matrices = divided(rows_and_matrices)
        y_TD, hidden = _ops.compute_fp8(x_TD, token_R, rows, matrices)
        ctx.save_for_backward(x_TD, token_R, hidden, *rows_and_matrices)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        launching.refuse_second_derivative()
        refuse_second_pass(ctx)
        x_TD, token_R, hidden, *rows_and_matrices = ctx.saved_tensors
        rows, matrices = divided(rows_and_matrices)
        trains_experts = any(ctx.needs_input_grad[-len(matrices) :])
        passed = (x_TD, token_R, hidden, rows, matrices, trains_experts)
        d_x_TD, d_weights_R, d_matrices = _ops.compute_fp8_backward(grads[0], *passed)
        d_rows = (d_weights_R, None, None)
        return d_x_TD, None, *d_rows, *(d_matrices if trains_experts else [None] * len(matrices))


def _new_tables(like: Tensor, num_rows: int, widths: Sequence[int]) -> list[Quantised]:
    """Return a table of quantised rows for each class, all in one buffer and with the same scales."""
    buffer = like.new_empty(num_rows * max(widths), dtype=fp8.DTYPE)
    scales_R = like.new_empty(num_rows, dtype=torch.float32)
    return [Quantised(table, scales_R) for table in tables(buffer, num_rows, widths)]


def _compute(
    x_TD: Tensor, token_R: Tensor, rows: Sequence[Tensor], matrices: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sums of the tokens' rows, and the hidden rows before their activation."""
    weights_R, counts_L, row_TK = Rows(*rows)
    num_rows = len(token_R)
    weights_R = weights_R.contiguous()
    classes = tiled_classes(matrices, counts_L, num_rows)
    hidden = x_TD.new_empty(num_rows * widest(matrices))
    hidden_tables = tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes])
    activated_tables = _new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes])
    output_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    tokens = quantise(x_TD)
    for each, hidden_RH, activated in zip(classes, hidden_tables, activated_tables, strict=True):
        row_product(tokens, quantise_transposed(each.up_EDH), each.tiles, hidden_RH, token_R)
        fp8.write_swiglu(hidden_RH, weights_R, activated, each.span)
        row_product(activated, quantise_transposed(each.down_EHD), each.tiles, output_RD)
    return fused.add_rows(output_RD, row_TK), hidden


def _compute_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    token_R: Tensor,
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
    hidden_widths = [each.up_EDH.shape[2] for each in classes]
    # As in bf16, gradients overwrite the hidden rows, and activated rows overwrite their own gradients.
    inner_tables = new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes])
    hidden_tables = tables(hidden, num_rows, hidden_widths)
    quantised_tables = _new_tables(x_TD, num_rows, hidden_widths)
    d_rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    d_weights_R = torch.zeros_like(weights_R)  # no kernel writes rows after those of the last expert
    tokens_grad = quantise(grad_TD)
    for number, each in enumerate(classes):
        # Index the tables instead of naming one: a name would keep its memory after ``clear``.
        # The gradient of rows contracts both matrices along their rows in memory: no transpose is needed.
        row_product(tokens_grad, quantise(each.down_EHD), each.tiles, inner_tables[number], token_R)
        gradients = SwigluGradients(hidden_tables[number], d_weights_R, inner_tables[number])
        fused.write_swiglu_gradients(
            inner_tables[number], hidden_tables[number], weights_R, gradients, each.span
        )
        del gradients
        fp8.write_quantised(hidden_tables[number], quantised_tables[number], each.span)
        row_product(quantised_tables[number], quantise(each.up_EDH), each.tiles, d_rows_RD)
    d_x_TD = fused.add_rows(d_rows_RD, row_TK)
    if not trains_experts:
        return d_x_TD, d_weights_R, []
    del quantised_tables, d_rows_RD, tokens_grad  # each table is freed before the next is allocated
    grad_RD = fused.copy_rows(grad_TD, row_TK, num_rows)
    d_downs = weight_gradients(inner_tables, [grad_RD] * len(classes), classes)
    inner_tables.clear()
    del grad_RD
    rows_RD = fused.copy_rows(x_TD, row_TK, num_rows)
    d_ups = weight_gradients([rows_RD] * len(classes), hidden_tables, classes)
    return d_x_TD, d_weights_R, [each for pair in zip(d_ups, d_downs, strict=True) for each in pair]


def _own_gradients_like(
    grad_TD: Tensor, x_TD: Tensor, token_R: Tensor, hidden: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return tensors like the results of ``_compute_backward``."""
    del token_R
    return gradients_like(grad_TD, x_TD, hidden, *rest)


launching.register(
    "compute_fp8(Tensor x_TD, Tensor token_R, Tensor[] rows, Tensor[] matrices) -> (Tensor, Tensor)",
    _compute,
    results_like,
)
launching.register(
    "compute_fp8_backward(Tensor grad_TD, Tensor x_TD, Tensor token_R, Tensor hidden, Tensor[] rows, "
    "Tensor[] matrices, bool trains_experts) -> (Tensor, Tensor, Tensor[])",
    _compute_backward,
    _own_gradients_like,
)
_ops: Any = torch.ops.experts
