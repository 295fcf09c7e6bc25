"""GPUs as the NVIDIA driver reports them, through NVML.

NVML complements torch for two reasons: it answers without a CUDA context, which takes some hundred
MB per GPU, and it still answers if torch sees no GPU at all, so that the error can say why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.types import bytes_text


@dataclass(frozen=True)
class NvmlView:
    """The driver's version and all of its GPUs, those that CUDA_VISIBLE_DEVICES hides included."""

    driver: str
    memory_free: Mapping[str, int | None]
    """Bytes by uuid, in NVML's order; None for a GPU that shares the host's memory."""

    def num_visible(self, cuda_visible_devices: str | None) -> int | None:
        """Return the number of GPUs that CUDA shows under this value of CUDA_VISIBLE_DEVICES."""
        return count_visible(tuple(self.memory_free), cuda_visible_devices)


@contextmanager
def _nvml_session() -> Iterator[Any]:
    """Yield the NVML bindings, or None if there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # Missing bindings, a missing library, or a driver that does not match it: NVML does not
        # work.
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def nvml_view() -> NvmlView | None:
    """Return the driver's view of the GPUs, or None if NVML does not work."""
    with _nvml_session() as nvml:
        if nvml is None:
            return None
        memory_free: dict[str, int | None] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            # A GPU that fell off the bus is not counted; one without memory of its own is.
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                memory_free[uuid] = None
                memory_free[uuid] = nvml.nvmlDeviceGetMemoryInfo(handle).free
        return NvmlView(nvml.nvmlSystemGetDriverVersion(), memory_free)


def count_visible(uuids: Sequence[str], visible: str | None) -> int | None:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves; None for MIG slices, which NVML counts
    differently.

    CUDA's rules: the first entry that names no GPU ends the list, and a repeated entry empties
    it.
    """
    if visible is None:
        return len(uuids)
    if visible.startswith("MIG-"):
        return None
    seen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        named = _named_gpus(uuids, entry)
        if len(named) != 1:
            break
        if named[0] in seen:
            return 0
        seen.append(named[0])
    return len(seen)


def _named_gpus(uuids: Sequence[str], entry: str) -> list[str]:
    """Return the GPUs that an entry names, by its number or by the beginning of its uuid."""
    if entry.isdecimal():
        return list(uuids[int(entry) : int(entry) + 1])
    return [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]


def gpu_processes(uuid: str | None) -> tuple[str, ...]:
    """Return the other processes that hold memory of a GPU: 'python (pid 4711, 3.0 GiB)'."""
    with _nvml_session() as nvml:
        if nvml is None or uuid is None:
            return ()
        with suppress(nvml.NVMLError):
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
            return tuple(_process_text(p.pid, p.usedGpuMemory) for p in processes if p.pid != os.getpid())
        return ()


def _process_text(pid: int, used_bytes: int | None) -> str:
    name = "a process"
    # In a container the driver may report pids of the host, which psutil does not find.
    with suppress(psutil.Error):
        name = psutil.Process(pid).name()
    memory = f", {bytes_text(used_bytes)}" if used_bytes else ""
    return f"{name} (pid {pid}{memory})"
