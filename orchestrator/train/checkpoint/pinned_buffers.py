"""Host memory for snapshots and for copies of the state that become checkpoints.

A GPU copies fast only to pinned memory, and pinning stalls the GPU; most of that time goes into
faulting in the pages. So a thread maps and touches the pages beforehand, while the steps go on."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from orchestrator.errors import ResourceError
from orchestrator.types import bytes_text

_SPARE_BYTES = 2**16  # a snapshot may be a little larger than the one before


class PinnedBuffers:
    """Buffers used in turn. Snapshots need two: one is filled while the driver fetches the other.

    Those of snapshots last as long as the process, so a host that joins another group uses them
    again."""

    def __init__(self, device: torch.device, num_buffers: int = 2) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._unpins: dict[int, weakref.finalize] = {}
        """Finalizers by the address of their buffer. They also run if this object is collected unclosed."""
        self._allocation: threading.Thread | None = None
        self._allocation_error: Exception | None = None
        self._prepared_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers in host memory."""
        return sum(buffer.numel() for buffer in self._buffers)

    def prepare(self, num_bytes: int) -> None:
        """Start to allocate the buffers in the background.

        On a CPU there is nothing to prepare."""
        if self._device.type != "cuda" or num_bytes <= self._prepared_bytes:
            return
        self.wait_for_allocation()
        self._prepared_bytes = num_bytes + _SPARE_BYTES
        self._allocation = threading.Thread(
            target=self._enlarge, args=(num_bytes,), name="pinned-buffers", daemon=True
        )
        self._allocation.start()

    def next_buffer(self, num_bytes: int) -> Tensor:
        """Return the buffer with the oldest content."""
        self.wait_for_allocation()
        self._buffers.reverse()
        if self._buffers[0].numel() < num_bytes:
            self._replace(0, num_bytes)
        return self._buffers[0]

    def close(self) -> None:
        """Unpin and drop the buffers."""
        self._join_allocation()
        self._allocation_error = None
        for index, buffer in enumerate(self._buffers):
            self._unpin(buffer)
            self._buffers[index] = torch.empty(0, dtype=torch.uint8)
        self._prepared_bytes = 0

    def wait_for_allocation(self) -> None:
        """Wait until the buffers are allocated, if that has begun. Raise the error if it has failed."""
        self._join_allocation()
        error = self._allocation_error
        if error is not None:
            self._allocation_error = None
            raise error

    def _join_allocation(self) -> None:
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def _enlarge(self, num_bytes: int) -> None:
        try:
            for index, buffer in enumerate(self._buffers):
                if buffer.numel() < num_bytes:
                    self._replace(index, num_bytes)
        except Exception as error:
            self._allocation_error = error

    def _replace(self, index: int, num_bytes: int) -> None:
        old = self._buffers[index]
        self._buffers[index] = self._allocate(num_bytes + _SPARE_BYTES)
        self._unpin(old)

    def _unpin(self, buffer: Tensor) -> None:
        # Unpin only: a reader that still holds the old buffer may go on reading it.
        unpin = self._unpins.pop(buffer.data_ptr(), None)
        if unpin is not None:
            unpin()

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._device.type != "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8)
        try:
            buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
            buffer.zero_()  # faults in the pages
            torch.cuda.check_error(_cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        except (OSError, RuntimeError) as error:
            # Do not fall back to plain memory: CUDA reports the error again at the next kernel.
            raise ResourceError(
                f"cannot pin {bytes_text(num_bytes)} of host memory for a copy of the training state: "
                f"{error}; free host memory, or run fewer processes on this machine"
            ) from error
        # The finalizer holds the buffer: pages that are unmapped while pinned cannot be pinned again.
        unpin = weakref.finalize(self, _unregister, buffer)
        unpin.atexit = False  # CUDA may have ended before  # pyrefly: ignore[missing-attribute]
        self._unpins[buffer.data_ptr()] = unpin
        return buffer


def _unregister(buffer: Tensor) -> None:
    # After an error of the device this fails too, and must not hide that error.
    with suppress(RuntimeError):
        torch.cuda.check_error(_cudart().cudaHostUnregister(buffer.data_ptr()))


def _cudart() -> Any:
    return torch.cuda.cudart()
