"""What this machine has: GPUs, cores, memory, versions. Read once, handed on as a frozen value.

NVML is asked beside torch for two reasons: it answers without creating a CUDA context (some
hundred MB per GPU), and it still answers where torch sees no GPU at all, so that we can say
why.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.plan.inventory.cpu import cpu_facts, system_text, usable_cores, usable_memory
from orchestrator.redaction import Secrets, secrets_of
from orchestrator.types import JSON, bytes_text


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch counts it (``index`` is that of ``cuda:index``). Memory in bytes."""

    index: int
    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None


@dataclass(frozen=True)
class Inventory:
    """One machine. ``cores`` and RAM are what this process may use, limits of its container
    included; memory in bytes."""

    gpus: tuple[Gpu, ...]
    cores: int
    ram_total: int
    ram_free: int
    cpu_name: str
    architecture: str
    cpu_bf16: bool
    """The CPU has bf16 units; without them bf16 is emulated, far slower than fp32."""
    driver: str | None
    versions: Mapping[str, str]
    """python, platform, torch, cuda, cudnn, nccl, ray; what is not there has no key."""
    gpu_error: str | None
    """Why GPUs that are there cannot be used: a line with what is wrong, a line with what to
    do."""
    disk_free: int

    @property
    def same_model(self) -> bool:
        return len({gpu.name for gpu in self.gpus}) <= 1

    @property
    def min_gpu_memory(self) -> int:
        """Memory of the smallest GPU; 0 where there is none."""
        return min((gpu.memory_total for gpu in self.gpus), default=0)

    def to_json(self) -> dict[str, JSON]:
        gpus = [asdict(gpu) | {"capability": list(gpu.capability)} for gpu in self.gpus]
        return asdict(self) | {"gpus": gpus, "versions": dict(self.versions)}


@dataclass(frozen=True)
class NvmlView:
    """What the driver says, whatever CUDA_VISIBLE_DEVICES hides."""

    driver: str
    memory_free: Mapping[str, int | None]
    """By uuid, in NVML's order; None for a GPU that shares the host's memory."""

    @property
    def visible(self) -> int | None:
        return count_visible(tuple(self.memory_free), os.environ.get("CUDA_VISIBLE_DEVICES"))


def inventory(disk: Path = Path(".")) -> Inventory:
    """This machine, as this process sees it. ``disk`` is the folder whose file system
    ``disk_free`` is about."""
    nvml = nvml_view()
    torch, torch_error = _import_torch()
    gpus, gpu_error = _gpus(torch, nvml) if torch else ((), torch_error)
    cpu_name, cpu_bf16 = cpu_facts(system_text(Path("/proc/cpuinfo")))
    ram_total, ram_free = usable_memory()
    return Inventory(
        gpus=gpus,
        cores=usable_cores(),
        ram_total=ram_total,
        ram_free=ram_free,
        cpu_name=cpu_name,
        architecture=platform.machine(),
        cpu_bf16=cpu_bf16,
        driver=nvml.driver if nvml else None,
        versions=_versions(torch),
        gpu_error=gpu_error,
        disk_free=shutil.disk_usage(existing_folder(disk)).free,
    )


def launched_by(environment: Mapping[str, str] | None = None) -> str | None:
    """The launcher that started this process, if one did: we start our own workers, so under one
    each would start a run."""
    variables = os.environ if environment is None else environment
    # accelerate starts its processes through torchrun, so its own mark is looked for first.
    if "ACCELERATE_MIXED_PRECISION" in variables:
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    if {"LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"} <= variables.keys():
        return "deepspeed"
    size = variables.get("WORLD_SIZE", "")
    return (
        "a distributed launcher" if "LOCAL_RANK" in variables and size.isdecimal() and int(size) > 1 else None
    )


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists already."""
    path = path.absolute()
    # os.path and not Path.exists, which raises for a folder that we may not look into
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


# --- GPUs


@contextmanager
def _nvml_session() -> Iterator[Any]:
    """The NVML bindings, or None where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (
        Exception
    ):  # bindings missing, library missing, driver and library out of step: all mean that NVML cannot tell
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def nvml_view() -> NvmlView | None:
    """The driver's view of the GPUs, or None where NVML does not work."""
    with _nvml_session() as nvml:
        if nvml is None:
            return None
        free: dict[str, int | None] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(
                nvml.NVMLError
            ):  # a GPU that fell off the bus is not counted; one without memory of its own is
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                free[uuid] = None
                free[uuid] = nvml.nvmlDeviceGetMemoryInfo(handle).free
        return NvmlView(nvml.nvmlSystemGetDriverVersion(), free)


def count_visible(uuids: Sequence[str], visible: str | None) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES leaves, by CUDA's rules: the first entry that names no
    GPU ends the list, a repeated one empties it. None for MIG slices, which NVML counts
    otherwise."""
    if visible is None:
        return len(uuids)
    if visible.startswith("MIG-"):
        return None
    found: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        by_number = uuids[int(entry) : int(entry) + 1] if entry.isdecimal() else ()
        named = [*by_number, *(uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry))]
        if len(named) != 1:
            break
        if named[0] in found:
            return 0
        found.append(named[0])
    return len(found)


def gpu_processes(uuid: str | None) -> tuple[str, ...]:
    """Other processes that hold memory of a GPU, as far as the driver tells: 'python (pid 4711,
    3.0 GiB)'."""
    with _nvml_session() as nvml:
        if nvml is None or uuid is None:
            return ()
        with suppress(nvml.NVMLError):
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
            return tuple(_process_text(p.pid, p.usedGpuMemory) for p in processes if p.pid != os.getpid())
        return ()


def _process_text(pid: int, held: int | None) -> str:
    name = "a process"
    with suppress(
        psutil.Error
    ):  # inside a container the driver may give pids of the host, which mean nothing here
        name = psutil.Process(pid).name()
    return f"{name} (pid {pid}{f', {bytes_text(held)}' if held else ''})"


def _import_torch() -> tuple[Any, str | None]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of CUDA that does not load
        return (
            None,
            f"torch cannot be imported: {_first_line(error)}\ninstall it anew: pip install --force-reinstall torch",
        )
    return torch, None


def _gpus(torch: Any, nvml: NvmlView | None) -> tuple[tuple[Gpu, ...], str | None]:
    # torch tells a driver that is too old by a warning, and answers False.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                return tuple(_gpu(torch, index, nvml) for index in range(torch.cuda.device_count())), None
            reason = _first_line(caught[-1].message) if caught else "torch.cuda.is_available() is False"
        except Exception as error:  # torch raises its set-up errors under several classes
            reason = _first_line(error)
    return (), _unusable(torch, nvml, reason)


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]


def _gpu(torch: Any, index: int, nvml: NvmlView | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    raw = getattr(properties, "uuid", None)
    uuid = None if raw is None else f"GPU-{str(raw).removeprefix('GPU-')}"
    free = nvml.memory_free.get(uuid or "") if nvml else None
    if free is None:
        free = torch.cuda.mem_get_info(index)[0]
    capability = (properties.major, properties.minor)
    return Gpu(
        index,
        properties.name,
        properties.total_memory,
        free,
        capability,
        properties.multi_processor_count,
        uuid,
    )


def _unusable(torch: Any, nvml: NvmlView | None, reason: str) -> str | None:
    """Why torch sees no GPU where the driver shows some; None where there is none, or the user has
    hidden them all."""
    count = nvml.visible if nvml else 0
    if nvml is None or count == 0:
        return None
    found = (
        f"the driver ({nvml.driver}) shows {count or 'some'} GPU(s), but torch {torch.__version__} sees none"
    )
    if torch.version.cuda is None:
        return f"{found}: it is a build without CUDA\ninstall a build with CUDA, as https://pytorch.org/get-started/locally shows"
    return (
        f"{found}: {reason}\nupdate the NVIDIA driver to one that supports CUDA {torch.version.cuda}, "
        f"or install a torch built for an older CUDA; in a container, start it with --gpus all"
    )


def _versions(torch: Any) -> dict[str, str]:
    versions: dict[str, str] = {"python": platform.python_version(), "platform": platform.platform()}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["ray"] = importlib.metadata.version("ray")
    if torch is None:
        return versions
    versions["torch"] = str(torch.__version__)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        with suppress(
            RuntimeError, AttributeError
        ):  # built without cuDNN, or one that does not fit the build
            if number := torch.backends.cudnn.version():
                versions["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        with suppress(RuntimeError, AttributeError):  # built without NCCL
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def set_environment(name: str, value: str) -> None:
    """Set a variable that a library reads at its start, unless the user has set it."""
    os.environ.setdefault(name, value)


def visible_gpus() -> int:
    """GPUs that this process may use, as the driver counts them; without importing torch."""
    nvml = nvml_view()
    return (nvml.visible or 0) if nvml else 0


def in_cluster() -> bool:
    """Whether this process was started inside a Ray cluster, as the entry point of a job, or was
    told of one."""
    return os.environ.get("RAY_ADDRESS", "local") != "local"


def secret_values() -> Secrets:
    """The secrets of this process's environment, to be masked wherever something is written or
    shown."""
    return secrets_of(os.environ)


def results_folder() -> Path:
    """Where runs are kept that were given no folder: beside the user's work; or, in a Ray job,
    whose working folder is a copy that goes with the job, where Ray keeps its own results."""
    here = Path.cwd()
    return Path.home() / "ray_results" if "runtime_resources" in here.parts else here / "results"
