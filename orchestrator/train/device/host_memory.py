"""Freed memory of the host: kept by the process during a run, and returned to the system after it.

By default glibc returns large freed blocks to the system at once. The next step then gets them
page by page, each at the price of a page fault."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from orchestrator.types import MIB

# Parameters of mallopt, from malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_WHILE_TRAINING = {
    # Blocks up to this size come from memory that can be kept.
    _MMAP_THRESHOLD: 1024 * MIB,
    # Free memory at the end of the heap that is kept.
    _TRIM_THRESHOLD: 2**31 - 1,
    # As large as a heap of a thread: glibc unmaps an empty one unless that much is asked for.
    _TOP_PAD: 64 * MIB,
}
# The values that glibc arrives at by itself after large blocks were freed.
_AFTERWARDS = {_MMAP_THRESHOLD: 32 * MIB, _TRIM_THRESHOLD: 64 * MIB, _TOP_PAD: 128 * 1024}


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Let this process keep freed memory for as long as the block lasts, if it trains on a CPU."""
    if device.type != "cpu":
        yield
        return
    _set(_WHILE_TRAINING)
    try:
        yield
    finally:
        _set(_AFTERWARDS)
        release_freed_memory()


def release_freed_memory() -> None:
    """Return freed memory to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _set(options: dict[int, int]) -> None:
    library = _glibc()
    if library is not None:
        for option, value in options.items():
            library.mallopt(option, value)


@cache
def _glibc() -> Any:
    """Return the C library of this process; None if it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
