"""Experts computed one after another.

This kernel is correct on every device and in every precision, and the reference for others. See
``experts.types`` for the letters of shapes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.host_copy import to_host
from experts.kernels import cpu, fused, launching
from experts.types import Kind


def experts_loop(
    rows_RD: Tensor,
    up_EDH: Tensor,
    down_EHD: Tensor,
    counts_E: Tensor,
    weights_R: Tensor,
    kind: Kind,
) -> Tensor:
    """Compute experts over rows sorted by expert, each row times its weight.

    An expert without rows multiplies an empty matrix, so that its gradient is zero and not
    absent."""
    if isinstance(rows_RD, FakeTensor) and len(up_EDH):
        # One expert has the shapes of all, and a model may have thousands of them.
        return activate(rows_RD @ up_EDH[0], weights_R, kind) @ down_EHD[0]
    sizes = row_counts(counts_E, rows_RD.shape[0])
    pieces = zip(
        rows_RD.split(sizes),
        up_EDH.unbind(),
        down_EHD.unbind(),
        weights_R.split(sizes),
        strict=True,
    )
    outputs = [activate(rows @ up, weights, kind) @ down for rows, up, down, weights in pieces]
    return torch.cat(outputs)


def activate(hidden: Tensor, weights_R: Tensor, kind: Kind) -> Tensor:
    """Apply the activation between an expert's two products, and the weight of each row.

    Weighting here equals weighting the expert's output, and neither that output nor its gradient
    need be kept."""
    if kind == "swiglu" and launching.available(hidden):
        return fused.weighted_swiglu(hidden, weights_R)
    if kind == "swiglu" and cpu.available(hidden):
        return cpu.weighted_swiglu(hidden, weights_R.to(hidden.dtype))
    scale_R1 = weights_R.to(hidden.dtype).unsqueeze(1)
    if kind == "ffn":
        return F.gelu(hidden) * scale_R1
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value * scale_R1


def row_counts(counts_E: Tensor, num_rows: int) -> list[int]:
    """Return the rows of each expert as Python integers.

    A traced model has no numbers: an even split."""
    if counts_E.device.type == "meta" or isinstance(counts_E, FakeTensor):
        base, extra = divmod(num_rows, len(counts_E))
        return [base + (index < extra) for index in range(len(counts_E))]
    sizes = to_host(counts_E.long()).tolist()
    if sum(sizes) != num_rows:
        raise RuntimeError(f"the counts of the experts sum to {sum(sizes)} rows; there are {num_rows}")
    return sizes
