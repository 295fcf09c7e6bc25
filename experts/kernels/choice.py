"""Choice of the kernel that computes the experts.

Where both work, take the one that ``benchmarks/moe/expert_kernels.py`` measured to be faster."""

from __future__ import annotations

import torch

from experts.kernels.grouped import MAX_GROUPS, grouped_works
from experts.types import Kernel


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
    # On a GPU only the fused kernel is faster; on a CPU the operator is faster in fp32.
    faster = dtype == torch.float32 if device.type == "cpu" else fused
    return "grouped" if works and faster else "loop"


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch computes all groups in one kernel.

    Elsewhere it loops over them and synchronizes the host."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
