"""SwiGLU experts of any sizes from tokens to tokens, in one function.

Only the tokens, the hidden rows before their activation and the routing are kept for the backward
pass. The first product gathers its rows from the tokens. The host never waits: how many rows a size
class has is known to the device alone. See ``experts.types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels import fused, row_products
from experts.kernels.fused import Span, SwigluGradients, contiguous_like
from experts.kernels.row_products import SIZE_MULTIPLE, RowTiles, row_product, weight_gradient
from experts.types import RowMap


def works(device: torch.device, dtype: torch.dtype, width: int, sizes: Sequence[int]) -> bool:
    """Whether the function supports this device, type and these sizes."""
    fits = all(size % SIZE_MULTIPLE == 0 for size in (width, *sizes))
    return fits and fused.available() and row_products.available(device, dtype)


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
    rows = _Rows(weights_R, counts_L, row_map.row_TK)
    result: Any = _Experts.apply(x_TD, row_map.token_R, *rows, *flat)
    return result


class _Rows(NamedTuple):
    """The rows of the experts, as both passes need them.

    Operators of torch have no arguments of other types: they take it as a list of tensors."""

    weights_R: Tensor
    counts_L: Tensor
    row_TK: Tensor


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, *rows_and_matrices: Tensor) -> Tensor:
        rows, matrices = _divided(rows_and_matrices)
        y_TD, hidden = _ops.compute(x_TD, token_R, rows, matrices)
        ctx.save_for_backward(x_TD, hidden, *rows_and_matrices)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling():  # a compiler refuses a second pass itself
            _refuse_second_pass(ctx)
        x_TD, hidden, *rows_and_matrices = ctx.saved_tensors
        rows, matrices = _divided(rows_and_matrices)
        trains_experts = any(ctx.needs_input_grad[-len(matrices) :])
        passed = (x_TD, hidden, rows, matrices, trains_experts)
        d_x_TD, d_weights_R, d_matrices = _ops.compute_backward(grads[0], *passed)
        d_rows = (d_weights_R, None, None)
        return d_x_TD, None, *d_rows, *(d_matrices if trains_experts else [None] * len(matrices))


def _refuse_second_pass(ctx: Any) -> None:
    if getattr(ctx, "is_used", False):
        raise RuntimeError(
            "a second backward pass through the same experts: the first one wrote gradients over their "
            "hidden rows; compute the forward pass again, or set --expert-kernel loop"
        )
    ctx.is_used = True


def _divided(rows_and_matrices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of ``_Rows``, and the matrices."""
    num_rows_tensors = len(_Rows._fields)
    return list(rows_and_matrices[:num_rows_tensors]), list(rows_and_matrices[num_rows_tensors:])


@dataclass(frozen=True)
class _Class:
    """A size class: its matrices and the tiles of its rows."""

    up_EDH: Tensor
    down_EHD: Tensor
    tiles: RowTiles

    @property
    def span(self) -> Span:
        """The rows of the class."""
        return Span(self.tiles.begins_E[:1], self.tiles.ends_E[-1:])


def _classes(matrices: Sequence[Tensor], counts_L: Tensor, num_rows: int) -> list[_Class]:
    pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
    bounds = accumulate((len(up_EDH) for up_EDH, _ in pairs), initial=0)
    slots = [slice(*bound) for bound in pairwise(bounds)]
    return [
        _Class(up_EDH, down_EHD, RowTiles.of(counts_L, num_rows, part))
        for (up_EDH, down_EHD), part in zip(pairs, slots, strict=True)
    ]


def _tables(buffer: Tensor, num_rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Return a table of rows for each class, all in one buffer of ``num_rows`` rows of the widest.

    A class uses its own rows of its table. They are not those of another class: rows of wider classes
    have higher numbers, and row r begins at r times the width of its table."""
    return [buffer[: num_rows * width].view(num_rows, width) for width in widths]


def _new_tables(like: Tensor, num_rows: int, widths: Sequence[int]) -> list[Tensor]:
    return _tables(like.new_empty(num_rows * max(widths)), num_rows, widths)


def _compute(
    x_TD: Tensor, token_R: Tensor, rows: Sequence[Tensor], matrices: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sums of the tokens' rows, and the hidden rows before their activation."""
    weights_R, counts_L, row_TK = _Rows(*rows)
    num_rows = len(token_R)
    x_TD = x_TD.contiguous()
    weights_R = weights_R.contiguous()
    classes = _classes(matrices, counts_L, num_rows)
    hidden = x_TD.new_empty(num_rows * _widest(matrices))
    hidden_tables = _tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes])
    activated_tables = _new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes])
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

    The hidden rows are overwritten. The operator does not declare it: a compiler would copy them first. None
    but the forward pass of the same function has them."""
    weights_R, counts_L, row_TK = _Rows(*rows)
    weights_R = weights_R.contiguous()
    num_rows = len(weights_R)
    classes = _classes(matrices, counts_L, num_rows)
    inner_tables = _new_tables(x_TD, num_rows, [each.down_EHD.shape[1] for each in classes])
    # The gradients take the place of the hidden rows, and the activated rows that of their gradients: the
    # kernel reads each element before it writes it, and nobody needs the old ones again.
    hidden_tables = _tables(hidden, num_rows, [each.up_EDH.shape[2] for each in classes])
    grad_RD = fused.copy_rows(grad_TD, row_TK, num_rows)
    d_weights_R = torch.zeros_like(weights_R)  # rows that are left out have weights of other hosts' experts
    for number, each in enumerate(classes):
        tables = (inner_tables[number], hidden_tables[number])
        _write_hidden_gradients(grad_RD, each, *tables, weights_R, d_weights_R)
        del tables
    d_downs: list[Tensor] = []
    if trains_experts:
        d_downs = _weight_gradients(inner_tables, [grad_RD] * len(classes), classes)
    inner_tables.clear()  # each table is freed before the next is allocated
    d_rows_RD = grad_RD  # its last reader was the gradient of the second matrix
    for each, d_hidden_RH in zip(classes, hidden_tables, strict=True):
        row_product(d_hidden_RH, each.up_EDH.transpose(1, 2), each.tiles, None, d_rows_RD)
    d_x_TD = fused.add_rows(d_rows_RD, row_TK)
    if not trains_experts:
        return d_x_TD, d_weights_R, []
    del grad_RD, d_rows_RD
    rows_RD = fused.copy_rows(x_TD, row_TK, num_rows)
    d_ups = _weight_gradients([rows_RD] * len(classes), hidden_tables, classes)
    return d_x_TD, d_weights_R, [each for pair in zip(d_ups, d_downs, strict=True) for each in pair]


def _write_hidden_gradients(
    grad_RD: Tensor, each: _Class, inner_RH: Tensor, hidden_RH: Tensor, weights_R: Tensor, d_weights_R: Tensor
) -> None:
    """Replace the hidden rows of a class by their gradients, and write its activated rows."""
    row_product(grad_RD, each.down_EHD.transpose(1, 2), each.tiles, None, inner_RH)
    gradients = SwigluGradients(hidden_RH, d_weights_R, inner_RH)
    fused.write_swiglu_gradients(inner_RH, hidden_RH, weights_R, gradients, each.span)


def _weight_gradients(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], classes: Sequence[_Class]
) -> list[Tensor]:
    """Return the gradient of one matrix of each class."""
    products = [_first_rows_product, *[weight_gradient] * (len(classes) - 1)]
    return [
        product(left_RK, right_RN, each.tiles)
        for product, left_RK, right_RN, each in zip(products, lefts, rights, classes, strict=True)
    ]


def _first_rows_product(left_RK: Tensor, right_RN: Tensor, tiles: RowTiles) -> Tensor:
    """Compute ``weight_gradient`` for experts that have the first rows, by torch's faster operator."""
    return F.grouped_mm(left_RK.t(), right_RN, offs=tiles.ends_E)


def _widest(matrices: Sequence[Tensor]) -> int:
    """Return the width of the widest hidden rows."""
    return max(up_EDH.shape[2] for up_EDH in matrices[::2])


def _results(
    x_TD: Tensor, token_R: Tensor, rows: Sequence[Tensor], matrices: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return tensors like the results of ``_compute``."""
    del rows
    return contiguous_like(x_TD), x_TD.new_empty(token_R.shape[0] * _widest(matrices))


def _gradients(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: Tensor,
    rows: Sequence[Tensor],
    matrices: Sequence[Tensor],
    trains_experts: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return tensors like the results of ``_compute_backward``."""
    del grad_TD, hidden
    d_matrices = [contiguous_like(matrix) for matrix in matrices] if trains_experts else []
    return contiguous_like(x_TD), contiguous_like(_Rows(*rows).weights_R), d_matrices


fused.register(
    "compute(Tensor x_TD, Tensor token_R, Tensor[] rows, Tensor[] matrices) -> (Tensor, Tensor)",
    _compute,
    _results,
)
fused.register(
    "compute_backward(Tensor grad_TD, Tensor x_TD, Tensor hidden, Tensor[] rows, Tensor[] matrices, "
    "bool trains_experts) -> (Tensor, Tensor, Tensor[])",
    _compute_backward,
    _gradients,
)
_ops: Any = torch.ops.experts
