"""A fake ``pynvml``: NVML without a driver."""

import os
from types import SimpleNamespace
from typing import Any

from orchestrator.types import GIB


def fake_nvml(missing: tuple[str, ...] = ()) -> Any:
    """Return a pynvml with two GPUs; the functions named in ``missing`` fail as on an old card."""

    class NVMLError(Exception): ...

    def unsupported(*arguments: Any) -> Any:
        raise NVMLError("Not Supported")

    def by_index(index: int) -> int:
        if index not in (0, 1):
            raise NVMLError("Invalid Argument")
        return index

    def by_uuid(uuid: str) -> int:
        return by_index({"GPU-aaaa": 0, "GPU-bbbb": 1}.get(uuid, 9))

    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB),
        SimpleNamespace(pid=-1, usedGpuMemory=GIB),
    ]
    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "555.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: f"Card {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=4 * GIB, total=80 * GIB),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=0, memory=7),
        "nvmlDeviceGetPowerUsage": lambda handle: 250_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: processes,
    }
    functions |= dict.fromkeys(missing, unsupported)
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **functions)
