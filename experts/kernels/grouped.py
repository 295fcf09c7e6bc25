"""All experts of one size in two grouped products: no host synchronization, fused on Hopper GPUs and later in bf16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.kernels.loop import swiglu


def grouped_is_fused(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether torch has one kernel for it. Elsewhere the operator is a loop of its own, with a host synchronization;
    its strides must be multiples of 16 bytes, which it does not check."""
    if device.type != "cuda" or dtype != torch.bfloat16 or width % 8 or hidden % 8:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def experts_grouped(rows_RD: Tensor, up_EDH: Tensor, down_EHD: Tensor, counts_E: Tensor) -> Tensor:
    """SwiGLU experts over rows sorted by expert. The counts come from the gate that made the rows, so the last offset is
    the number of rows: the operator leaves rows past it uninitialised."""
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    hidden_RH = F.grouped_mm(rows_RD.contiguous(), up_EDH, offs=offsets_E)
    return F.grouped_mm(swiglu(hidden_RH), down_EHD, offs=offsets_E)
