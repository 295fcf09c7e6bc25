"""The waits of a device for the peers of its host, seen without a call of CUDA."""

from __future__ import annotations

import torch

from experts.hosts.membership import WaitState

_NUM_POSITIONS = 4096
"""Even, so that odd positions are waits. A device is never so far behind its host: CUDA blocks the host
when about a thousand operations are queued."""


class _StreamWaits:
    """The points that one stream of a device has passed."""

    def __init__(self, device: torch.device) -> None:
        # Only a copy to pinned memory runs without the host waiting for it.
        self.reached = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._reached_in_memory = self.reached.numpy()
        self.num_recorded = 0

    def num_passed(self) -> int:
        # In this order: the stream cannot be ahead of what has been recorded when it is read later.
        reached = int(self._reached_in_memory)
        num_recorded = self.num_recorded
        return num_recorded - (num_recorded - reached) % _NUM_POSITIONS


class DeviceWaits:
    """Counts the beginnings and the ends of a device's waits in memory of the host.

    The device itself writes the count as it passes each point of its work. The thread that sends
    heartbeats reads it there and calls no CUDA: while another thread copies a value from the device, as
    ``loss.item()`` does, CUDA's calls wait for it, perhaps for as long as a peer is slow. A query of a
    CUDA event holds the interpreter lock meanwhile, so that a healthy host falls silent.

    Each stream has a count of its own. FSDP2 gathers weights on other streams than the one that
    computes, and passes points there that were recorded later: in a common count they would end a wait
    that goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Views of one tensor on the device: a point then costs a single copy of eight bytes.
        self._positions = torch.arange(_NUM_POSITIONS, device=device).unbind()
        self._streams: dict[int, _StreamWaits] = {}

    def record_point(self) -> None:
        """Record that a wait begins or ends, each in turn, at this point of the current stream's work."""
        stream = self._current_stream()
        waits = self._streams.get(stream)
        if waits is None:
            waits = self._streams[stream] = _StreamWaits(self._device)
        waits.num_recorded += 1
        self._write(waits, waits.num_recorded % _NUM_POSITIONS)

    def _current_stream(self) -> int:
        is_cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device).cuda_stream if is_cuda else 0

    def _write(self, waits: _StreamWaits, position: int) -> None:
        """Let the stream write a position when it has done all work before."""
        waits.reached.copy_(self._positions[position], non_blocking=True)

    def observe(self) -> WaitState:
        """Return the completed waits, and whether any stream waits now. May be called from any thread."""
        passed = [waits.num_passed() for waits in list(self._streams.values())]
        num_completed = sum(number // 2 for number in passed)
        return WaitState(num_completed, waiting=any(number % 2 == 1 for number in passed))
