"""The waits of a device for the peers of its host, seen without a call of CUDA."""

from __future__ import annotations

import torch

from experts.membership import WaitState

_NUM_POSITIONS = 4096
"""Even, so that odd positions are waits. A device is never so far behind its host: CUDA blocks the host
when about a thousand operations are queued."""


class DeviceWaits:
    """Counts the beginnings and the ends of a device's waits in memory of the host.

    The device itself writes the count as it passes each point of its work. The thread that sends
    heartbeats reads it there and calls no CUDA: while another thread copies a value from the device, as
    ``loss.item()`` does, CUDA's calls wait for it, perhaps for as long as a peer is slow. A query of a
    CUDA event holds the interpreter lock meanwhile, so that a healthy host falls silent."""

    def __init__(self, device: torch.device) -> None:
        # Views of one tensor on the device: a point then costs a single copy of eight bytes.
        self._positions = torch.arange(_NUM_POSITIONS, device=device).unbind()
        # Only a copy to pinned memory runs without the host waiting for it.
        self._reached = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._reached_in_memory = self._reached.numpy()
        self._num_recorded = 0

    def record_point(self) -> None:
        """Record that a wait begins or ends, each in turn, at this point of the device's work."""
        self._num_recorded += 1
        self._write(self._num_recorded % _NUM_POSITIONS)

    def _write(self, position: int) -> None:
        """Let the device write a position when it has done all work before."""
        self._reached.copy_(self._positions[position], non_blocking=True)

    def observe(self) -> WaitState:
        """Return the completed waits, and whether the device waits now. May be called from any thread."""
        # In this order: the device cannot be ahead of what has been recorded when it is read later.
        reached = int(self._reached_in_memory)
        num_recorded = self._num_recorded
        num_passed = num_recorded - (num_recorded - reached) % _NUM_POSITIONS
        return WaitState(num_passed // 2, waiting=num_passed % 2 == 1)
