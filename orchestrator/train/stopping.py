"""When to stop: a wish of one worker that all follow at the same step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BEHIND = 2  # steps that the host may run ahead of the device before it looks


class StopFlag:
    """Whether a run was asked to stop. On several workers each step's sums carry the wish along; on a GPU it is read two
    steps later, so that the device never waits for the host."""

    def __init__(self, device: torch.device, asked: Callable[[], bool] = lambda: False) -> None:
        self.asked, self._device = asked, device
        self._under_way: deque[tuple[Tensor, Any]] = deque()

    def should_stop(self, told: Tensor | None) -> bool:
        """After a step; ``told`` is the sum of wishes, or None in one process."""
        if told is None:
            return self.asked()
        if self._device.type != "cuda":
            return bool(told)
        copied = torch.empty((), dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((copied, event))
        if len(self._under_way) <= _BEHIND:
            return False
        copied, event = self._under_way.popleft()
        event.synchronize()
        return bool(copied)
