"""GPU figures from NVML, one sample at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.record.events.kinds import DeviceSample


class NvmlGpus:
    """GPUs by NVML index or UUID. NVML ignores CUDA_VISIBLE_DEVICES: the caller translates.

    NVML stays initialised until the process ends, as in torch: samples may be taken after ``stop``.
    """

    def __init__(self, wanted: Sequence[int | str]) -> None:
        self.error: str | None = None
        self._handles: list[tuple[int, Any]] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no package, no driver, no permission: like a machine without GPUs
            self.error = (
                f"GPUs {list(wanted)} cannot be monitored, NVML does not answer: {error}. "
                "Is the NVIDIA driver installed?"
            )
            return
        self._nvml = pynvml
        for position, gpu in enumerate(wanted):
            self._add(position, gpu)

    def driver(self) -> str | None:
        return _value_or_none(self._nvml.nvmlSystemGetDriverVersion) if self._handles else None

    def read(self) -> tuple[DeviceSample, ...]:
        return tuple(self._read(index, handle) for index, handle in self._handles)

    def _add(self, position: int, gpu: int | str) -> None:
        try:
            handle = self._handle(gpu)
        except Exception as error:
            count = _value_or_none(self._nvml.nvmlDeviceGetCount)
            message = f"GPU {gpu} cannot be monitored, NVML does not list it among its {count} GPUs: {error}"
            self.error = f"{self.error}; {message}" if self.error else message
            return
        index = _value_or_none(lambda: self._nvml.nvmlDeviceGetIndex(handle))
        self._handles.append((position if index is None else index, handle))

    def _handle(self, gpu: int | str) -> Any:
        if isinstance(gpu, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        return self._nvml.nvmlDeviceGetHandleByUUID(gpu)

    def _read(self, index: int, handle: Any) -> DeviceSample:
        nvml = self._nvml
        memory = _value_or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = _value_or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = _value_or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        own_memory = _value_or_none(lambda: _own_memory(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        temperature = _value_or_none(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return DeviceSample(
            index=index,
            name=_value_or_none(lambda: nvml.nvmlDeviceGetName(handle)),
            memory_used=memory and memory.used,
            memory_total=memory and memory.total,
            process_memory=own_memory,
            utilization=rates and rates.gpu,
            memory_utilization=rates and rates.memory,
            temperature=temperature,
            power=None if milliwatts is None else milliwatts / 1000,
        )


def _value_or_none(read: Callable[[], Any]) -> Any:
    """Return NVML's answer or None: the values a GPU gives depend on the card, the driver and the
    container."""
    try:
        return read()
    except Exception:
        return None


def _own_memory(processes: Sequence[Any]) -> int | None:
    """Return this process's bytes on a GPU; None if it is not listed (a container sees the outer pids)."""
    own = [
        process.usedGpuMemory
        for process in processes
        if process.pid == os.getpid() and process.usedGpuMemory is not None
    ]
    return sum(own) if own else None
