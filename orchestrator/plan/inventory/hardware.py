"""The hardware and software of this machine as a frozen value, and the environment variables that
matter.

The environment of the process is read here and nowhere else below ``runtime``.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.plan.inventory.commit import git_commit
from orchestrator.plan.inventory.cpu import cpu_facts, system_text, usable_cores, usable_memory
from orchestrator.plan.inventory.gpus import Gpu, NvmlView, find_gpus, import_torch, nvml_view
from orchestrator.redaction import Secrets, secrets_of
from orchestrator.types import JSON


@dataclass(frozen=True)
class Inventory:
    """One machine. ``cores`` and RAM are those that this process may use, limits of its container
    included.

    Memory is in bytes.
    """

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
    """Versions of python, platform, torch, cuda, cudnn, nccl and ray; a missing one has no key."""
    gpu_error: str | None
    """Why present GPUs cannot be used: a line that says what is wrong, and a line that says what
    to do."""
    disk_free: int
    omp_threads: int | None = None
    """The number of OMP_NUM_THREADS, where the user may have set it."""
    commit: str | None = None
    """The commit of the current folder: that of the user's code, not of this program."""

    @property
    def same_model(self) -> bool:
        return len({gpu.name for gpu in self.gpus}) <= 1

    @property
    def min_gpu_memory(self) -> int:
        """Memory of the smallest GPU; 0 without GPUs."""
        return min((gpu.memory_total for gpu in self.gpus), default=0)

    def to_json(self) -> dict[str, JSON]:
        gpus = [asdict(gpu) | {"capability": list(gpu.capability)} for gpu in self.gpus]
        return asdict(self) | {"gpus": gpus, "versions": dict(self.versions)}


def inventory(disk: Path = Path(".")) -> Inventory:
    """Return this machine as this process sees it. ``disk_free`` is that of the file system of
    ``disk``."""
    nvml = nvml_view()
    torch, torch_error = import_torch()
    gpus: tuple[Gpu, ...] = ()
    gpu_error = torch_error
    if torch:
        gpus, gpu_error = find_gpus(torch, nvml, num_visible(nvml))
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
        omp_threads=_omp_threads(),
        commit=git_commit(Path.cwd()),
    )


def num_visible(nvml: NvmlView | None) -> int | None:
    """Return the number of GPUs of the driver that CUDA shows this process; None if NVML cannot
    tell."""
    return nvml.num_visible(os.environ.get("CUDA_VISIBLE_DEVICES")) if nvml else None


def ray_auth_mode() -> str:
    """Return how Ray's commands authenticate themselves; empty if that is left to Ray."""
    return os.environ.get("RAY_AUTH_MODE", "")


def visible_gpus() -> int:
    """Return the number of GPUs that this process may use, without importing torch."""
    return num_visible(nvml_view()) or 0


def existing_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    path = path.absolute()
    # os.path instead of Path.exists, which raises for a folder without read permission.
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def _versions(torch: Any) -> dict[str, str]:
    versions: dict[str, str] = {"python": platform.python_version(), "platform": platform.platform()}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["ray"] = importlib.metadata.version("ray")
    if torch is None:
        return versions
    versions["torch"] = str(torch.__version__)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        with suppress(RuntimeError, AttributeError):  # no cuDNN, or one that does not match the build
            if number := torch.backends.cudnn.version():
                versions["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        with suppress(RuntimeError, AttributeError):  # a build without NCCL
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


# --- environment


def launched_by(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the launcher that started this process, if one did.

    This project starts its own workers: under a launcher each process would start a run of its
    own.
    """
    variables = os.environ if environment is None else environment
    # accelerate starts its processes through torchrun, so its own variable is checked first.
    if "ACCELERATE_MIXED_PRECISION" in variables:
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    if {"LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"} <= variables.keys():
        return "deepspeed"
    world_size = variables.get("WORLD_SIZE", "")
    several = world_size.isdecimal() and int(world_size) > 1
    return "a distributed launcher" if "LOCAL_RANK" in variables and several else None


def set_environment(name: str, value: str) -> None:
    """Set a variable that a library reads when it starts, unless the user has set it."""
    os.environ.setdefault(name, value)


def nccl_may_share_gpus() -> bool:
    """Return whether the user has allowed several ranks of NCCL on one GPU (NCCL 2.30 and later)."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def in_cluster() -> bool:
    """Return whether this process runs inside a Ray job, or RAY_ADDRESS names a cluster."""
    return os.environ.get("RAY_ADDRESS", "local") != "local"


def _omp_threads() -> int | None:
    """Return the number of OMP_NUM_THREADS; None in a cluster, whose processes Ray sets it for."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_set = given.isdecimal() and int(given) > 0
    return int(given) if is_set and not in_cluster() else None


def secret_values() -> Secrets:
    """Return the secrets of this process's environment, to be redacted in everything written or
    shown."""
    return secrets_of(os.environ)


def results_folder() -> Path:
    """Return the folder of runs without ``--run-dir``: ``results`` in the working directory.

    The working directory of a Ray job is a copy that is deleted with the job, so a job writes
    where Ray keeps its own results.
    """
    folder = Path.cwd()
    return Path.home() / "ray_results" if "runtime_resources" in folder.parts else folder / "results"
