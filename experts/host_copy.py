"""Copies of device values for the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory.

    Such a copy waits for the device, perhaps for a collective of slow peers, and holds CUDA's lock
    while it waits. The thread that sends heartbeats asks the device for the state of its waits, needs
    that lock, and would fall silent: a healthy host would count as frozen. So the host waits before it
    copies, which needs no lock."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()
