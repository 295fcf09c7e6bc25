"""What NVML tells of the GPUs, one sample at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceSample:
    """Use of one GPU: bytes, percent, degrees Celsius, watts. ``None`` where the driver gives no value."""

    index: int
    name: str | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    process_memory: int | None = None
    utilization: float | None = None
    memory_utilization: float | None = None
    temperature: float | None = None
    power: float | None = None


class NvmlGpus:
    """GPUs by NVML index or UUID. NVML knows nothing of CUDA_VISIBLE_DEVICES: the caller translates.

    NVML stays initialised until the process ends, as torch leaves it too: samples may be taken after ``stop``.
    """

    def __init__(self, wanted: Sequence[int | str]) -> None:
        self.error: str | None = None
        self._handles: list[tuple[int, Any]] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except (
            Exception
        ) as error:  # no package, no driver, no permission: a machine without GPUs, as far as we can tell
            self.error = f"GPUs {list(wanted)} were to be watched, but NVML does not answer: {error}. Is the NVIDIA driver installed?"
            return
        self._nvml = pynvml
        for position, gpu in enumerate(wanted):
            self._add(position, gpu)

    def driver(self) -> str | None:
        return _value(self._nvml.nvmlSystemGetDriverVersion) if self._handles else None

    def read(self) -> tuple[DeviceSample, ...]:
        return tuple(self._read(index, handle) for index, handle in self._handles)

    def _add(self, position: int, gpu: int | str) -> None:
        try:
            by = (
                self._nvml.nvmlDeviceGetHandleByIndex
                if isinstance(gpu, int)
                else self._nvml.nvmlDeviceGetHandleByUUID
            )
            handle = by(gpu)
        except Exception as error:
            seen = _value(self._nvml.nvmlDeviceGetCount)
            message = f"GPU {gpu} was to be watched, but NVML does not find it among its {seen} GPUs: {error}"
            self.error = f"{self.error}; {message}" if self.error else message
            return
        index = _value(lambda: self._nvml.nvmlDeviceGetIndex(handle))
        self._handles.append((position if index is None else index, handle))

    def _read(self, index: int, handle: Any) -> DeviceSample:
        nvml = self._nvml
        memory = _value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = _value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = _value(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return DeviceSample(
            index=index,
            name=_value(lambda: nvml.nvmlDeviceGetName(handle)),
            memory_used=memory and memory.used,
            memory_total=memory and memory.total,
            process_memory=_value(lambda: _own_memory(nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
            utilization=rates and rates.gpu,
            memory_utilization=rates and rates.memory,
            temperature=_value(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power=None if milliwatts is None else milliwatts / 1000,
        )


def _value(read: Callable[[], Any]) -> Any:
    """What NVML answers, or None: which values a device gives depends on the card, the driver and the container."""
    try:
        return read()
    except Exception:
        return None


def _own_memory(processes: Sequence[Any]) -> int | None:
    """This process's bytes on a device; None when it is not listed (in a container NVML lists the pids of outside)."""
    own = [
        process.usedGpuMemory
        for process in processes
        if process.pid == os.getpid() and process.usedGpuMemory is not None
    ]
    return sum(own) if own else None
