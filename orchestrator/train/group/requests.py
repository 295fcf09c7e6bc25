"""Requests to a run that one worker receives and all workers follow at the same step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Votes = tuple[float, float, float]
"""One number each for an interrupt, an end and a checkpoint."""

NO_VOTES: Votes = (0.0, 0.0, 0.0)
_STEPS_BEHIND = 2  # how far the host may run ahead of the device before it reads a vote


@dataclass(frozen=True)
class Requests:
    """The requests of the user, or of a callback, to a run."""

    interrupt: bool = False
    """Stop at once, with a checkpoint."""
    end: str | None = None
    """End the run as complete, for this reason."""
    save: bool = False
    """Save a checkpoint."""

    @property
    def votes(self) -> Votes:
        return float(self.interrupt), float(self.end is not None), float(self.save)


class RequestVotes:
    """The requests that all workers agree on.

    Any worker may receive one. On several workers the sums of each step count them as votes, so all
    workers follow them after the same step. On a GPU votes are read two steps later: the device never
    waits for the host."""

    def __init__(self, device: torch.device, num_workers: int, take: Callable[[], Requests]) -> None:
        """``take`` returns this worker's requests since the last call."""
        self._device = device
        self._decides_alone = num_workers == 1
        self._take = take
        self._reason = "a callback asked to stop"
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def cast(self) -> Votes:
        """Return this worker's votes for the sums of the next step."""
        if self._decides_alone:
            return NO_VOTES
        own = self._take()
        self._reason = own.end or self._reason
        return own.votes

    def agreed(self, votes: Tensor | None = None) -> Requests:
        """Return what all workers follow after this step.

        ``votes`` are the sums of the step. A single process has none: it decides at any moment, and
        several workers only with them."""
        if self._decides_alone:
            return self._take()
        if votes is None:
            return Requests()
        if self._device.type == "cuda":
            self._copy_to_host(votes)
            if len(self._in_flight) <= _STEPS_BEHIND:
                return Requests()
            votes, copied = self._in_flight.popleft()
            copied.synchronize()
        interrupt, end, save = votes.tolist()
        return Requests(bool(interrupt), self._reason if end else None, bool(save))

    def _copy_to_host(self, votes: Tensor) -> None:
        # Only a copy to pinned memory runs without the host waiting for it.
        host_votes = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True)
        host_votes.copy_(votes, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._in_flight.append((host_votes, copied))
