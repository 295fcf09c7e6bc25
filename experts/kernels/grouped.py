"""All experts of one size in two grouped products: no host synchronization, fused on Hopper GPUs and later in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.kernels.loop import activate, experts_loop
from experts.types import Kind

_BYTES = 16  # strides must be multiples of so many
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_works(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether the operator takes these types and sizes at all."""
    per_stride = _BYTES // dtype.itemsize if dtype in _DTYPES else 0
    return (
        per_stride > 0
        and width % per_stride == 0
        and hidden % per_stride == 0
        and device.type in ("cuda", "cpu")
    )


def experts_grouped(
    rows_RD: Tensor, up_EDH: Tensor, down_EHD: Tensor, counts_E: Tensor, weights_R: Tensor, kind: Kind
) -> Tensor:
    """Experts over rows sorted by expert, each row times its weight."""
    if rows_RD.shape[0] == 0:  # nothing to launch, and gradients of zero all the same
        return experts_loop(rows_RD, up_EDH, down_EHD, torch.zeros_like(counts_E), weights_R, kind)
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    check_offsets(offsets_E, rows_RD.shape[0])
    hidden_RH = grouped_product(rows_RD, up_EDH, offsets_E)
    return grouped_product(activate(hidden_RH, weights_R, kind), down_EHD, offsets_E)


def grouped_product(rows_RK: Tensor, weights_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Each group of rows times its own matrix, with offsets that ``check_offsets`` has seen."""
    experts, inner, outer = weights_EKN.shape
    if rows_RK.dtype != weights_EKN.dtype or rows_RK.dtype not in _DTYPES:
        raise TypeError(
            f"rows are {rows_RK.dtype}, weights {weights_EKN.dtype}; one of {', '.join(map(str, _DTYPES))} was needed for both"
        )
    if rows_RK.shape[1] != inner or offsets_E.shape != (experts,) or offsets_E.dtype != torch.int32:
        raise ValueError(
            f"rows {tuple(rows_RK.shape)}, weights {tuple(weights_EKN.shape)}, {tuple(offsets_E.shape)} offsets in {offsets_E.dtype}; "
            "the weights' second size as width and one int32 offset per group were needed"
        )
    per_stride = _BYTES // rows_RK.dtype.itemsize
    if inner % per_stride or outer % per_stride:
        raise ValueError(
            f"weights of {inner} × {outer} in {rows_RK.dtype}; multiples of {per_stride} were needed"
        )
    made: Tensor = F.grouped_mm(rows_RK.contiguous(), weights_EKN, offs=offsets_E)
    result: Tensor = _RealStrides.apply(made)  # pyright: ignore[reportAssignmentType]
    return result


def check_offsets(offsets_E: Tensor, rows: int) -> None:
    """Groups follow each other and end with the last row. The operator takes wrong offsets without a word, and leaves rows past
    the last one uninitialised, in the result and in the gradient. On a GPU the device checks, and the host does not wait."""
    if torch.compiler.is_compiling() or isinstance(offsets_E, FakeTensor):
        return
    steps_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
    right = (steps_E >= 0).all() & (offsets_E[-1] == rows)
    if offsets_E.device.type == "cuda":
        torch._assert_async(right, "offsets of grouped rows do not cover them")  # pyright: ignore[reportPrivateImportUsage]
    elif not bool(right):
        raise ValueError(f"offsets {offsets_E.tolist()} do not cover {rows} rows in order")


class _RealStrides(torch.autograd.Function):
    """Passes on; in the backward pass gives the operator a gradient with strides of its own (an expanded one fails)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0].contiguous()
