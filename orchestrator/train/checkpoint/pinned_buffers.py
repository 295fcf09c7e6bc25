"""Memory that copies of a host's state are put into. A GPU writes fast only to memory that is pinned, and while memory is being pinned
the GPU is given nothing to do: most of that time goes into finding the pages. So they are found beforehand, beside the steps."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import torch
from torch import Tensor

_SPARE = 2**16  # bytes beyond what is asked for: a copy may be a little larger than the one before


class PinnedBuffers:
    """Two, used in turn: one is filled while the other's copy is fetched. They stay for as long as the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * 2
        self._making: threading.Thread | None = None
        self._asked = 0

    def prepare(self, size: int) -> None:
        """Both are going to be about this large. On a CPU memory is had at once."""
        if self._device.type != "cuda" or size <= self._asked:
            return
        self._wait()
        self._asked = size + _SPARE
        self._making = threading.Thread(target=self._enlarge, args=(size,), name="rooms", daemon=True)
        self._making.start()

    def next_buffer(self, size: int) -> Tensor:
        """The one whose copy has been handed on longest."""
        self._wait()
        self._rooms.reverse()
        if self._rooms[0].numel() < size:
            self._replace(0, size)
        return self._rooms[0]

    def _wait(self) -> None:
        if self._making is not None:
            self._making.join()
            self._making = None

    def _enlarge(self, size: int) -> None:
        for number, room in enumerate(self._rooms):
            if room.numel() < size:
                self._replace(number, size)

    def _replace(self, number: int, size: int) -> None:
        old, self._rooms[number] = self._rooms[number], self._made(size + _SPARE)
        if (
            self._device.type == "cuda" and old.numel()
        ):  # whoever reads it still may: it is only pinned no more
            torch.cuda.check_error(_cuda().cudaHostUnregister(old.data_ptr()))

    def _made(self, size: int) -> Tensor:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        room = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        room.zero_()  # finds the pages
        torch.cuda.check_error(_cuda().cudaHostRegister(room.data_ptr(), size, 0))
        return room


def _cuda() -> Any:
    return torch.cuda.cudart()
