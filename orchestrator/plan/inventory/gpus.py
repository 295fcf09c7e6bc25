"""GPUs as torch sees them, and as the NVIDIA driver reports them, through NVML.

NVML complements torch for two reasons: it answers without a CUDA context, which takes some hundred
MB per GPU, and it still answers if torch sees no GPU at all, so that the error can say why.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.types import bytes_text, first_line


@dataclass(frozen=True)
class Gpu:
    """One GPU with the index that torch gives it (``cuda:index``). Memory in bytes."""

    index: int
    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None


def import_torch() -> tuple[Any, str | None]:
    """Return the torch module, or None with the reason."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library that cannot be loaded
        reason = first_line(error, max_chars=None)
        fix = "reinstall it: pip install --force-reinstall torch"
        return None, f"torch cannot be imported: {reason}\n{fix}"
    return torch, None


def find_gpus(
    torch: Any, nvml: NvmlView | None, num_visible: int | None
) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs, or none with the reason if the driver shows ``num_visible`` of them."""
    # torch reports a driver that is too old by a warning, and returns False.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                return tuple(_gpu(torch, index, nvml) for index in range(torch.cuda.device_count())), None
            reason = "torch.cuda.is_available() is False"
            if caught:
                reason = first_line(caught[-1].message, max_chars=None)
        except Exception as error:  # torch raises its set-up errors under several classes
            reason = first_line(error, max_chars=None)
    return (), _why_unusable(torch, nvml, num_visible, reason)


def _gpu(torch: Any, index: int, nvml: NvmlView | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    raw_uuid = getattr(properties, "uuid", None)
    # torch leaves out the prefix that NVML has.
    uuid = None if raw_uuid is None else f"GPU-{str(raw_uuid).removeprefix('GPU-')}"
    memory_free = nvml.memory_free.get(uuid or "") if nvml else None
    if memory_free is None:
        memory_free = torch.cuda.mem_get_info(index)[0]
    return Gpu(
        index=index,
        name=properties.name,
        memory_total=properties.total_memory,
        memory_free=memory_free,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        uuid=uuid,
    )


def _why_unusable(torch: Any, nvml: NvmlView | None, num_visible: int | None, reason: str) -> str | None:
    """Return why torch sees no GPU although the driver shows some, and what to do.

    None if there is no GPU, or if the user has hidden all of them.
    """
    if nvml is None or num_visible == 0:
        return None
    count = num_visible or "some"
    found = f"the driver ({nvml.driver}) shows {count} GPU(s), but torch {torch.__version__} sees none"
    if torch.version.cuda is None:
        fix = "install a build with CUDA, as https://pytorch.org/get-started/locally shows"
        return f"{found}: it is a build without CUDA\n{fix}"
    return (
        f"{found}: {reason}\nupdate the NVIDIA driver to one that supports CUDA {torch.version.cuda}, "
        f"or install a torch built for an older CUDA; in a container, start it with --gpus all"
    )


# --- as the driver reports them


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
