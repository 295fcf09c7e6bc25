"""Memory of the device: limits, peaks and cached blocks; freed memory of the host.

The process keeps what it frees during a run, and returns it to the system after it. By default glibc returns
large freed blocks at once: the next step then gets them page by page, each at the price of a page fault."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from orchestrator.types import MIB

_MAX_IDLE_SHARE = 0.1  # of the device's memory, that cached blocks may keep between epochs


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    phrases = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def free_cached(device: torch.device) -> None:
    """Collect garbage, and return cached blocks to the driver, or freed memory to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()


def release_idle(device: torch.device) -> None:
    """Return cached blocks to the driver at the end of an epoch, if there are many.

    Getting them again costs milliseconds each, so a few stay.
    """
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if idle > _MAX_IDLE_SHARE * torch.cuda.get_device_properties(device).total_memory:
            torch.cuda.empty_cache()


def limit_memory(device: torch.device, fraction: float) -> None:
    """Limit this process to a fraction of the device's memory, as the plan assumed."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # Linux only: writing 5 resets the peak resident size
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return peak bytes allocated and reserved since the last reset (CPU: peak resident size)."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    resident = _peak_resident_bytes()
    return {"allocated": resident, "reserved": resident}


def _peak_resident_bytes() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    # Without /proc: the peak of the whole process, which cannot be reset.
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocated_now(device: torch.device) -> int:
    """Return the bytes allocated on the device; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


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
