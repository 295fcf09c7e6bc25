"""Which kernel computes the experts: what was measured to be faster, where both work (``benchmarks/expert_kernels.py``)."""

from __future__ import annotations

import torch

from experts.kernels.grouped import grouped_works
from experts.types import Kernel

_LARGE = 2**16  # width × hidden: from here on the products outweigh what it costs to begin each of them


def choose_kernel(asked: Kernel, device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> Kernel:
    """``loop`` or ``grouped``. ``asked`` forces one; a grouped product that cannot be had is an error then."""
    works = grouped_works(device, dtype, width, hidden)
    if asked == "grouped" and not works:
        raise ValueError(
            f"the grouped kernel does not take experts of {width} × {hidden} in {dtype} on {device.type}; it needs fp32, bf16 or fp16 "
            "and sizes in multiples of 16 bytes: use --expert-kernel auto"
        )
    if asked != "auto":
        return asked
    if device.type == "cpu":
        return "grouped" if works and dtype == torch.float32 and width * hidden < _LARGE else "loop"
    return "grouped" if works and is_fused(device, dtype) else "loop"


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has one kernel for all groups. Elsewhere the operator is a loop of its own, with a host synchronization."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
