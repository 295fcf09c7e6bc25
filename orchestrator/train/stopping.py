"""A request to stop that one worker receives and all workers follow at the same step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

_STEPS_BEHIND = 2  # how far the host may run ahead of the device before it reads a vote


class StopFlag:
    """Whether a run is to stop.

    Any worker may receive the request. On several workers the sums of each step count the
    requests as votes, so all workers stop after the same step. On a GPU a vote is read two steps
    later: the device never waits for the host."""

    def __init__(self, device: torch.device, requested: Callable[[], bool]) -> None:
        self.requested = requested
        self._device = device
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def should_stop(self, votes: Tensor | None) -> bool:
        """Return whether to stop after this step.

        ``votes`` is the step's sum, or None in a single process."""
        if votes is None:
            return self.requested()
        if self._device.type != "cuda":
            return bool(votes)
        self._copy_to_host(votes)
        if len(self._in_flight) <= _STEPS_BEHIND:
            return False
        earlier_votes, copied = self._in_flight.popleft()
        copied.synchronize()
        return bool(earlier_votes)

    def _copy_to_host(self, votes: Tensor) -> None:
        # Only a copy to pinned memory runs without the host waiting for it.
        host_votes = torch.empty((), dtype=votes.dtype, pin_memory=True)
        host_votes.copy_(votes, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._in_flight.append((host_votes, copied))
