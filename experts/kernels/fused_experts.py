"""SwiGLU experts of any sizes from tokens to tokens, in one function.

Only the tokens, the hidden rows before their activation and the routing are kept for the backward
pass. The first product gathers its rows from the tokens. The host never waits: how many rows a size
class has is known to the device alone.

With ``fp8`` the operands of four of the six products are in fp8: outputs and gradients of rows are computed
with a scale for each row and each column. Gradients of weights, which sum over rows of different scales, stay
in bf16, and so do all tensors that are kept or returned. Weights are quantised in each pass. They change once
per optimizer step only: micro-batches repeat it. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.kernels import fp8, fused, launching, row_products
from experts.kernels.expert_tables import (
    Rows,
    TiledClass,
    divided,
    mark_overwritten,
    new_tables,
    refuse_second_pass,
    tables,
    tiled_classes,
    weight_gradients,
    widest,
)
from experts.kernels.fp8 import Quantised, quantise, quantise_transposed
from experts.kernels.fused import SwigluGradients
from experts.kernels.launching import contiguous_like
from experts.kernels.row_products import SIZE_MULTIPLE, row_product
from experts.types import RowMap


def works(
    device: torch.device, dtype: torch.dtype, width: int, sizes: Sequence[int], in_fp8: bool = False
) -> bool:
    """Whether the function supports this device, type and these sizes."""
    if in_fp8 and dtype != torch.bfloat16:
        return False
    fits = all(size % SIZE_MULTIPLE == 0 for size in (width, *sizes))
    return fits and launching.available() and row_products.available(device, dtype)


def experts_fused(
    x_TD: Tensor,
    matrices: Sequence[tuple[Tensor, Tensor]],
    counts_L: Tensor,
    weights_R: Tensor,
    row_map: RowMap,
    in_fp8: bool = False,
) -> Tensor:
    """Return the sum of each token's rows: outputs of its experts, times the weights of the rows.

    ``matrices`` are the stacked ``up_EDH`` and ``down_EHD`` of each size class, the smallest first.
    For one class it equals ``sum_rows(experts_grouped(copy_rows(x_TD, row_map), ...), row_map)``.
    There must be a row."""
    flat = [matrix for pair in matrices for matrix in pair]
    rows = Rows(weights_R, counts_L, row_map.row_TK)
    result: Any = _Experts.apply(x_TD, row_map.token_R, in_fp8, *rows, *flat)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, in_fp8: bool, *rows_and_matrices: Tensor) -> Tensor:
        rows, matrices = divided(rows_and_matrices)
        y_TD, hidden = _ops.compute(x_TD, token_R, rows, matrices, in_fp8)
        # In bf16 the backward pass gathers no rows.
        gathering = [token_R] if in_fp8 else []
        ctx.in_fp8 = in_fp8
        ctx.save_for_backward(*gathering, x_TD, hidden, *rows_and_matrices)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        launching.refuse_second_derivative()
        refuse_second_pass(ctx)
        token_R = ctx.saved_tensors[0] if ctx.in_fp8 else None
        x_TD, hidden, *rows_and_matrices = ctx.saved_tensors[int(ctx.in_fp8) :]
        rows, matrices = divided(rows_and_matrices)
        trains_experts = any(ctx.needs_input_grad[-len(matrices) :])
        passed = (x_TD, token_R, hidden, rows, matrices, trains_experts)
        d_x_TD, d_weights_R, d_matrices = _ops.compute_backward(grads[0], *passed)
        d_rows = (d_weights_R, None, None)
        return d_x_TD, None, None, *d_rows, *(d_matrices if trains_experts else [None] * len(matrices))


def _compute(
    x_TD: Tensor, token_R: Tensor, rows: Sequence[Tensor], matrices: Sequence[Tensor], in_fp8: bool
) -> tuple[Tensor, Tensor]:
    """Return the sums of the tokens' rows, and the hidden rows before their activation."""
    weights_R, counts_L, row_TK = Rows(*rows)
    num_rows = len(token_R)
    x_TD = x_TD.contiguous()
    weights_R = weights_R.contiguous()
    classes = tiled_classes(matrices, counts_L, num_rows)
    widths = [each.down_EHD.shape[1] for each in classes]
    hidden = x_TD.new_empty(num_rows * widest(matrices))
    hidden_tables = tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes])
    if in_fp8:
        quantised_tables = _quantised_tables(x_TD, num_rows, widths)
        output_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
        tokens = quantise(x_TD)
        for each, hidden_RH, activated in zip(classes, hidden_tables, quantised_tables, strict=True):
            fp8.row_product(tokens, quantise_transposed(each.up_EDH), each.tiles, hidden_RH, token_R)
            fp8.write_swiglu(hidden_RH, weights_R, activated, each.span)
            fp8.row_product(activated, quantise_transposed(each.down_EHD), each.tiles, output_RD)
    else:
        activated_tables = new_tables(x_TD, num_rows, widths)
        output_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
        for each, hidden_RH, activated_RH in zip(classes, hidden_tables, activated_tables, strict=True):
            row_product(x_TD, each.up_EDH, each.tiles, token_R, hidden_RH)
            fused.write_swiglu(hidden_RH, weights_R, activated_RH, each.span)
            row_product(activated_RH, each.down_EHD, each.tiles, None, output_RD)
    return fused.add_rows(output_RD, row_TK), hidden


def _quantised_tables(like: Tensor, num_rows: int, widths: Sequence[int]) -> list[Quantised]:
    """Return a table of quantised rows for each class, all in one buffer and with the same scales."""
    buffer = like.new_empty(num_rows * max(widths), dtype=fp8.DTYPE)
    scales_R = like.new_empty(num_rows, dtype=torch.float32)
    return [Quantised(table, scales_R) for table in tables(buffer, num_rows, widths)]


@dataclass
class _BackwardPass:
    """The tensors of both kinds of backward pass, and the tables that they write."""

    classes: Sequence[TiledClass]
    weights_R: Tensor
    row_TK: Tensor
    d_weights_R: Tensor
    hidden_tables: list[Tensor]
    inner_tables: list[Tensor]
    """Gradients of activated rows, then these rows. Emptied when they are no longer needed: each table is
    freed before the next is allocated."""

    def write_hidden_gradients(self, number: int) -> None:
        """Replace the hidden rows of a class by their gradients, and write its activated rows."""
        hidden_RH = self.hidden_tables[number]
        inner_RH = self.inner_tables[number]
        gradients = SwigluGradients(hidden_RH, self.d_weights_R, inner_RH)
        fused.write_swiglu_gradients(
            inner_RH, hidden_RH, self.weights_R, gradients, self.classes[number].span
        )

    def rows_of(self, x_TD: Tensor) -> Tensor:
        """Return copies of tokens, or of their gradients, sorted in memory."""
        return fused.copy_rows(x_TD, self.row_TK, len(self.weights_R))

    def gradients_of(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
        return weight_gradients(lefts, rights, self.classes)


def _compute_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    token_R: Tensor | None,
    hidden: Tensor,
    rows: Sequence[Tensor],
    matrices: Sequence[Tensor],
    trains_experts: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the gradients of tokens and weights, and those of the matrices if they are trained.

    With ``token_R`` it computes in fp8. The hidden rows are overwritten: see ``mark_overwritten``."""
    mark_overwritten(hidden)
    weights_R, counts_L, row_TK = Rows(*rows)
    weights_R = weights_R.contiguous()
    num_rows = len(weights_R)
    classes = tiled_classes(matrices, counts_L, num_rows)
    # The backward pass allocates no second set of hidden rows. Gradients overwrite the hidden rows, and the
    # activated rows overwrite their own gradients: the kernel reads each element before it writes it.
    own = _BackwardPass(
        classes,
        weights_R,
        row_TK,
        torch.zeros_like(weights_R),  # no kernel writes rows after those of the last expert
        tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes]),
        new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes]),
    )
    if token_R is None:
        d_x_TD, d_downs = _token_gradients(own, grad_TD, trains_experts)
    else:
        d_x_TD, d_downs = _token_gradients_in_fp8(own, grad_TD, token_R, trains_experts)
    if not trains_experts:
        return d_x_TD, own.d_weights_R, []
    # The forward pass gathered these rows within its product. The gradient needs them sorted in memory.
    d_ups = own.gradients_of([own.rows_of(x_TD)] * len(classes), own.hidden_tables)
    return d_x_TD, own.d_weights_R, [each for pair in zip(d_ups, d_downs, strict=True) for each in pair]


def _token_gradients(
    own: _BackwardPass, grad_TD: Tensor, trains_experts: bool
) -> tuple[Tensor, list[Tensor]]:
    """Write the gradients of hidden rows, and return those of tokens and of the second matrices."""
    grad_RD = own.rows_of(grad_TD)
    for number, each in enumerate(own.classes):
        row_product(grad_RD, each.down_EHD.transpose(1, 2), each.tiles, None, own.inner_tables[number])
        own.write_hidden_gradients(number)
    d_downs: list[Tensor] = []
    if trains_experts:
        d_downs = own.gradients_of(own.inner_tables, [grad_RD] * len(own.classes))
    own.inner_tables.clear()
    d_rows_RD = grad_RD  # reuse the memory: the gradient of the second matrix was its last reader
    for each, d_hidden_RH in zip(own.classes, own.hidden_tables, strict=True):
        row_product(d_hidden_RH, each.up_EDH.transpose(1, 2), each.tiles, None, d_rows_RD)
    return fused.add_rows(d_rows_RD, own.row_TK), d_downs


def _token_gradients_in_fp8(
    own: _BackwardPass, grad_TD: Tensor, token_R: Tensor, trains_experts: bool
) -> tuple[Tensor, list[Tensor]]:
    """Compute ``_token_gradients`` with products in fp8."""
    quantised_tables = _quantised_tables(
        grad_TD, len(token_R), [each.up_EDH.shape[2] for each in own.classes]
    )
    d_rows_RD = grad_TD.new_empty(len(token_R), grad_TD.shape[1])
    tokens_grad = quantise(grad_TD)
    for number, each in enumerate(own.classes):
        # The gradient of rows contracts both matrices along their rows in memory: no transpose is needed.
        down = each.down_EHD
        fp8.row_product(tokens_grad, quantise(down), each.tiles, own.inner_tables[number], token_R)
        own.write_hidden_gradients(number)
        fp8.write_quantised(own.hidden_tables[number], quantised_tables[number], each.span)
        fp8.row_product(quantised_tables[number], quantise(each.up_EDH), each.tiles, d_rows_RD)
    d_x_TD = fused.add_rows(d_rows_RD, own.row_TK)
    del quantised_tables, d_rows_RD, tokens_grad
    d_downs: list[Tensor] = []
    if trains_experts:
        grad_RD = own.rows_of(grad_TD)
        d_downs = own.gradients_of(own.inner_tables, [grad_RD] * len(own.classes))
    own.inner_tables.clear()
    return d_x_TD, d_downs


def _results_like(
    x_TD: Tensor, token_R: Tensor, _: Sequence[Tensor], matrices: Sequence[Tensor], __: bool
) -> tuple[Tensor, Tensor]:
    """Return tensors like the results of ``_compute``."""
    return contiguous_like(x_TD), x_TD.new_empty(token_R.shape[0] * widest(matrices))


def _gradients_like(
    _: Tensor,
    x_TD: Tensor,
    __: Tensor | None,
    ___: Tensor,
    rows: Sequence[Tensor],
    matrices: Sequence[Tensor],
    trains_experts: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return tensors like the results of ``_compute_backward``."""
    d_matrices = [contiguous_like(matrix) for matrix in matrices] if trains_experts else []
    return contiguous_like(x_TD), contiguous_like(Rows(*rows).weights_R), d_matrices


launching.register(
    "compute(Tensor x_TD, Tensor token_R, Tensor[] rows, Tensor[] matrices, bool in_fp8) -> (Tensor, Tensor)",
    _compute,
    _results_like,
)
launching.register(
    "compute_backward(Tensor grad_TD, Tensor x_TD, Tensor? token_R, Tensor hidden, Tensor[] rows, "
    "Tensor[] matrices, bool trains_experts) -> (Tensor, Tensor, Tensor[])",
    _compute_backward,
    _gradients_like,
)
_ops: Any = torch.ops.experts
