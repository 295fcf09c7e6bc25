"""A torch and an NVML with invented GPUs, patched into the process."""

from __future__ import annotations

import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.types import GIB, MIB

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")
OTHER_PID = 2**22 + 1  # above the largest pid of Linux


class FakeNvmlError(Exception):
    pass


def patch_nvml(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...] = UUIDS, lost: int | None = None
) -> None:
    """Let NVML show these GPUs; the GPU of index ``lost`` does not answer."""

    def handle(index: int) -> int:
        if index == lost:
            raise FakeNvmlError
        return index

    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
        SimpleNamespace(pid=OTHER_PID, usedGpuMemory=3 * GIB),
    ]
    bindings = SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "535.54",
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=uuids.index,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=(handle + 1) * MIB),
        nvmlDeviceGetComputeRunningProcesses=lambda _: processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", bindings)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def patch_torch(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cuda: str | None = "13.0", warning: str = ""
) -> None:
    """Let torch see so many GPUs, or none with a warning."""
    import torch

    def is_available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return gpus > 0

    def properties(index: int) -> Any:
        return SimpleNamespace(
            name="NVIDIA H200",
            total_memory=GIB,
            major=9,
            minor=0,
            multi_processor_count=132,
            uuid=UUIDS[index].removeprefix("GPU-"),
        )

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * MIB, GIB))
    monkeypatch.setattr(torch.version, "cuda", cuda)
