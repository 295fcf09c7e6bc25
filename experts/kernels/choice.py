"""Which kernel computes the experts: what was measured to be faster, where both work (``benchmarks/expert_kernels.py``)."""

from __future__ import annotations

import torch

from experts.kernels.grouped import grouped_works
from experts.types import Kernel


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
    pays = dtype == torch.float32 if device.type == "cpu" else is_fused(device, dtype)
    return "grouped" if works and pays else "loop"


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has one kernel for all groups. Elsewhere the operator is a loop of its own, with a host synchronization."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
