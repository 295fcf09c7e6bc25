"""Computing in the types of the operands, also where autocast is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on the device of a tensor.

    Entering torch's context takes 10 µs, in small models as long as an operation: where autocast is
    off already, there is none."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
