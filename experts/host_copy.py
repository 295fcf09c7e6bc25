"""Copies of device values for the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory.

    Such a copy waits for the device, perhaps for a collective of slow peers. CUDA's calls in other
    threads wait for the copy. So the host waits before it copies: other threads can use the device
    meanwhile, such as the one that aborts a group."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()
