"""Experts with biases, with adapters, or with an activation that the fused kernels do not have.

See ``experts.types`` for the letters of shapes; a product has inner size K and outer size N."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from experts.kernels.adapters import Product, adapted_product
from experts.kernels.grouped import checked_offsets, grouped_product
from experts.kernels.loop import row_counts
from experts.kernels.packed_product import Matrices, PackedStack, packed_products

Activation = Callable[[Tensor], Tensor]
"""The function between an expert's two products, of hidden rows."""
WeightedActivation = Callable[[Tensor, Tensor], Tensor]
"""That function times the weight of each row, of hidden rows and weights."""


def experts_general(
    rows_RD: Tensor,
    weights: Mapping[str, Matrices],
    counts_E: Tensor,
    weights_R: Tensor,
    activate: WeightedActivation,
    grouped: bool,
) -> Tensor:
    """Compute experts over rows sorted by expert, each row times its weight.

    ``weights`` are stacks by role: ``up``, ``down`` and, of experts that have them, their biases and
    adapters. Packed matrices are multiplied one after another, ``grouped`` or not."""
    dense = _grouped(counts_E, len(rows_RD)) if grouped and len(rows_RD) else partial(_loop, counts_E)

    def product(rows_RK: Tensor, matrices: Matrices) -> Tensor:
        if isinstance(matrices, PackedStack):
            return packed_products(rows_RK, matrices, counts_E)
        return dense(rows_RK, matrices)

    expert_R = torch.arange(len(counts_E), device=rows_RD.device)
    expert_R = expert_R.repeat_interleave(counts_E, output_size=len(rows_RD))
    return two_products(product, rows_RD, weights, expert_R, weights_R, activate)


def two_products(
    product: Product,
    rows_RD: Tensor,
    weights: Mapping[str, Matrices],
    expert_R: Tensor,
    weights_R: Tensor,
    activate: WeightedActivation,
) -> Tensor:
    """Return the outputs of experts by a function that multiplies rows by the matrices of their experts."""
    hidden_RH = adapted_product(product, rows_RD, weights, "up")
    if "up_bias" in weights:
        hidden_RH = hidden_RH + _biases(weights, "up_bias")[expert_R]
    # The activation applies the row's weight, which equals weighting the output but for the output's bias.
    output_RD = adapted_product(product, activate(hidden_RH, weights_R), weights, "down")
    if "down_bias" in weights:
        scale_R1 = weights_R.to(rows_RD.dtype).unsqueeze(1)
        output_RD = output_RD + _biases(weights, "down_bias")[expert_R] * scale_R1
    return output_RD


def _biases(weights: Mapping[str, Matrices], role: str) -> Tensor:
    biases_EN = weights[role]
    assert isinstance(biases_EN, Tensor), f"{role} is packed; only matrices are"
    return biases_EN


def _loop(counts_E: Tensor, rows_RK: Tensor, weights_EKN: Tensor) -> Tensor:
    """Multiply each group of rows by a matrix of its own, one after another.

    An expert without rows multiplies an empty matrix, so that its gradient is zero and not absent."""
    if isinstance(rows_RK, FakeTensor) and len(weights_EKN):
        return rows_RK @ weights_EKN[0]  # one product has the shapes of all
    groups = rows_RK.split(row_counts(counts_E, len(rows_RK)))
    return torch.cat([rows @ matrix for rows, matrix in zip(groups, weights_EKN.unbind(), strict=True)])


def _grouped(counts_E: Tensor, num_rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    offsets_E = checked_offsets(counts_E.cumsum(0).to(torch.int32), num_rows)
    return partial(grouped_product, offsets_E=offsets_E)
