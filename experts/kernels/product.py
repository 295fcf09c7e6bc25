"""Products of rows and a matrix in the form that the device is fastest at."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

_LEAST_ROWS, _LEAST_WEIGHTS = 128, 2**17  # from here on the copies pay: see benchmarks/LOG.md
_ARM = platform.machine() in ("aarch64", "arm64")


def product(rows_RD: Tensor, weight_DN: Tensor) -> Tensor:
    """``rows_RD @ weight_DN``. On ARM CPUs torch multiplies by a transposed matrix nearly twice as fast as by a plain one, in
    fp32: there, large products are made of transposed copies, in both passes."""
    if not _ARM or rows_RD.device.type != "cpu" or rows_RD.dtype != torch.float32 or torch.compiler.is_compiling():
        return rows_RD @ weight_DN
    if rows_RD.shape[0] < _LEAST_ROWS or weight_DN.numel() < _LEAST_WEIGHTS:
        return rows_RD @ weight_DN
    result: Tensor = _Product.apply(rows_RD, weight_DN)  # pyright: ignore[reportAssignmentType]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weight_DN: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weight_DN)
        return rows_RD @ weight_DN.t().contiguous().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows_RD, weight_DN = ctx.saved_tensors
        (grad_RN,) = grads
        d_rows = grad_RN @ weight_DN.t() if ctx.needs_input_grad[0] else None
        d_weight = rows_RD.t().contiguous() @ grad_RN.t().contiguous().t() if ctx.needs_input_grad[1] else None
        return d_rows, d_weight
