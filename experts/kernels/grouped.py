"""All experts of one size in two grouped products.

They need no synchronization of the host, and are fused in bf16 on Hopper GPUs and later. See
``experts.types`` for the letters of shapes; a product has inner size K and outer size N."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.kernels.loop import activate, experts_loop
from experts.types import Kernel, Kind

_STRIDE_BYTES = 16  # the operator needs strides in multiples of this
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_GROUPS = 1023
"""The most groups that the operator takes where it is fused: one block of threads prepares them."""


def grouped_works(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether the operator supports this device, type and these sizes."""
    if dtype not in _DTYPES or device.type not in ("cuda", "cpu"):
        return False
    multiple = size_multiple(dtype)
    return width % multiple == 0 and hidden % multiple == 0


def size_multiple(dtype: torch.dtype) -> int:
    """Return the number that both sizes of a matrix must be multiples of."""
    return _STRIDE_BYTES // dtype.itemsize


def choose_kernel(
    requested: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    hidden: int,
    experts: int = 1,
) -> Kernel:
    """Return ``loop`` or ``grouped`` for this number of ``experts`` of one size.

    Raises ValueError where ``grouped`` is requested and does not work."""
    fused = is_fused(device, dtype)
    works = grouped_works(device, dtype, width, hidden) and not (fused and experts > MAX_GROUPS)
    if requested == "grouped" and not works:
        raise ValueError(
            f"the grouped kernel does not take experts of {width} × {hidden} in {dtype} on "
            f"{device.type}, {experts} of one size; it needs fp32, bf16 or fp16, sizes in multiples of 16 "
            f"bytes and, where it is fused, at most {MAX_GROUPS} of one size: use --expert-kernel auto"
        )
    if requested != "auto":
        return requested
    # As ``benchmarks/moe/expert_kernels.py`` measured: on a GPU only the fused kernel is faster; on a CPU the
    # operator is faster in fp32.
    faster = dtype == torch.float32 if device.type == "cpu" else fused
    return "grouped" if works and faster else "loop"


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch computes all groups in one kernel.

    Elsewhere it loops over them and synchronizes the host."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def experts_grouped(
    rows_RD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    counts_E: Tensor,
    weights_R: Tensor,
    kind: Kind,
) -> Tensor:
    """Compute experts over rows sorted by expert, each row times its weight."""
    num_rows = rows_RD.shape[0]
    if num_rows == 0:
        # There is nothing to launch, but gradients must be zero and not absent.
        return experts_loop(rows_RD, up_EDH, down_EHD, torch.zeros_like(counts_E), weights_R, kind)
    offsets_E = checked_offsets(counts_E.cumsum(0).to(torch.int32), num_rows)
    hidden_RH = grouped_product(rows_RD, up_EDH, offsets_E)
    return grouped_product(activate(hidden_RH, weights_R, kind), down_EHD, offsets_E)


def grouped_product(rows_RK: Tensor, weights_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply each group of rows by a matrix of its own.

    The offsets must be those of ``checked_offsets``."""
    experts, inner, outer = weights_EKN.shape
    if rows_RK.dtype != weights_EKN.dtype or rows_RK.dtype not in _DTYPES:
        known = ", ".join(map(str, _DTYPES))
        raise TypeError(
            f"rows are {rows_RK.dtype}, weights {weights_EKN.dtype}; one of {known} was needed for both"
        )
    if rows_RK.shape[1] != inner or offsets_E.shape != (experts,) or offsets_E.dtype != torch.int32:
        raise ValueError(
            f"rows {tuple(rows_RK.shape)}, weights {tuple(weights_EKN.shape)}, "
            f"{tuple(offsets_E.shape)} offsets in "
            f"{offsets_E.dtype}; the weights' second size as width and one int32 offset per group were needed"
        )
    multiple = size_multiple(rows_RK.dtype)
    if inner % multiple or outer % multiple:
        raise ValueError(
            f"weights of {inner} × {outer} in {rows_RK.dtype}; multiples of {multiple} were needed"
        )
    product: Tensor = F.grouped_mm(rows_RK.contiguous(), weights_EKN, offs=offsets_E)
    result: Tensor = _ContiguousGrad.apply(product)
    return result


def checked_offsets(offsets_E: Tensor, num_rows: int) -> Tensor:
    """Return offsets of groups that follow each other and end with the last row.

    The operator accepts wrong offsets silently, reads beyond the rows, and leaves rows after the last
    offset uninitialised, in the result and in the gradient. On a CPU wrong ones are refused. On a GPU
    the host would have to wait to see them, and an assertion of the device would end its CUDA context:
    they are bounded. ``dispatch`` returns no wrong offsets; where rows of another host do not match
    their announcement, ``RowCheck`` reports it at the next wait."""
    if torch.compiler.is_compiling() or isinstance(offsets_E, FakeTensor):
        return offsets_E
    bounded_E = bounded_offsets(offsets_E, num_rows)
    if offsets_E.device.type == "cpu" and not torch.equal(bounded_E, offsets_E):
        raise ValueError(f"offsets {offsets_E.tolist()} do not cover {num_rows} rows in order")
    return bounded_E


def bounded_offsets(offsets_E: Tensor, num_rows: int) -> Tensor:
    """Return the offsets, those that are out of order or out of bounds moved to the nearest place."""
    bounded_E = offsets_E.clamp(0, num_rows).cummax(0).values
    bounded_E[-1:] = num_rows
    return bounded_E


class _ContiguousGrad(torch.autograd.Function):
    """The identity with a contiguous gradient: the operator's backward pass fails on expanded ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0].contiguous()
