"""The inventory against machines that are not here: control groups as files, torch and NVML as stand-ins."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from orchestrator.plan import hardware
from orchestrator.plan.hardware import Gpu, Inventory, count_visible, cpu_facts, inventory, launched_by, usable_cores, usable_memory
from orchestrator.types import GIB, MIB

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")


def gpu(index: int = 0, name: str = "NVIDIA H200", total: int = 140 * GIB) -> Gpu:
    return Gpu(index, name, total, total, (9, 0), 132, UUIDS[index])


def machine(*gpus: Gpu) -> Inventory:
    return Inventory(gpus, 8, 32 * GIB, 16 * GIB, "a CPU", "x86_64", False, "580.1", {"torch": "2.13.0"}, None, GIB)


# --- this machine


def test_inventory_of_this_machine(tmp_path: Path):
    found = inventory(tmp_path / "not" / "yet")
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert 0 < found.ram_free <= found.ram_total <= psutil.virtual_memory().total
    assert {"python", "platform", "torch", "ray"} <= found.versions.keys()
    assert found.disk_free > 0
    assert found.cpu_name


def test_to_json_survives_json():
    plain = machine(gpu(0), gpu(1)).to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["cores"] == 8


def test_models_and_smallest_memory():
    assert machine().same_model
    assert machine().min_gpu_memory == 0
    assert machine(gpu(0), gpu(1)).same_model
    mixed = machine(gpu(0), gpu(1, "NVIDIA L4", 24 * GIB))
    assert not mixed.same_model
    assert mixed.min_gpu_memory == 24 * GIB


# --- CPU and memory


@pytest.mark.parametrize(
    ("cpuinfo", "name", "bf16"),
    [
        ("model name\t: Xeon 6\nflags\t\t: sse4_2 avx512_bf16 amx_bf16\n", "Xeon 6", True),
        ("model name\t: Core i5\nflags\t\t: sse4_2 avx2 avx512f\n", "Core i5", False),
        ("Features\t: fp asimd bf16 i8mm\nCPU part\t: 0xd4f\n", "ARM Neoverse-V2", True),
        ("Features\t: fp asimd asimddp\nCPU part\t: 0xd0c\n", "ARM Neoverse-N1", False),
    ],
)
def test_cpu_facts(cpuinfo: str, name: str, bf16: bool):
    assert cpu_facts(cpuinfo) == (name, bf16)


def test_cpu_facts_of_an_unknown_system_still_name_something():
    assert cpu_facts("")[0]


def cgroups(root: Path, membership: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 16),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 3),
        ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
        ("0::/host/only", {"cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 16),
        ("2:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "200000"}, 16),
    ],
)
def test_cores_respect_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], cores: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(cgroups(tmp_path, membership, files)) == cores


def test_cores_respect_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(tmp_path) == 1


@pytest.fixture
def big_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))


@pytest.mark.usefixtures("big_machine")
def test_memory_respects_the_limit_and_counts_cached_files_as_free(tmp_path: Path):
    files = {"a/memory.max": str(8 * GIB), "a/memory.current": str(5 * GIB), "a/memory.stat": f"anon 1\ninactive_file {2 * GIB}"}
    assert usable_memory(cgroups(tmp_path, "0::/a/b", {**files, "a/b/memory.max": "max"})) == (8 * GIB, 5 * GIB)


@pytest.mark.usefixtures("big_machine")
def test_memory_limit_of_version_1(tmp_path: Path):
    files = {"memory/a/memory.limit_in_bytes": str(4 * GIB), "memory/a/memory.usage_in_bytes": str(GIB)}
    assert usable_memory(cgroups(tmp_path, "4:memory:/a", files)) == (4 * GIB, 3 * GIB)


@pytest.mark.usefixtures("big_machine")
def test_memory_without_a_limit_is_the_machine_s(tmp_path: Path):
    files = {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/a/memory.usage_in_bytes": str(GIB)}
    assert usable_memory(cgroups(tmp_path, "4:memory:/a", files)) == (64 * GIB, 60 * GIB)


# --- GPUs


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0,2", 2),
        (" 1 , 0 ", 2),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("1,1", 0),
        ("GPU-cccc", 1),
        ("GPU-aa", 0),
        ("GPU-aabb-2,GPU-cccc-3", 2),
        ("MIG-1234", None),
    ],
)
def test_visible_gpus_follow_cuda_s_rules(visible: str | None, count: int | None):
    assert count_visible(UUIDS, visible) == count


class FakeNvmlError(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...] = UUIDS, lost: int | None = None) -> None:
    def handle(index: int) -> int:
        if index == lost:
            raise FakeNvmlError
        return index

    processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=1), SimpleNamespace(pid=2**22 + 1, usedGpuMemory=3 * GIB)]
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


def fake_torch(monkeypatch: pytest.MonkeyPatch, gpus: int, cuda: str | None = "13.0", warning: str = "") -> None:
    import torch

    def available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return gpus > 0

    def properties(index: int) -> Any:
        uuid = UUIDS[index].removeprefix("GPU-")
        return SimpleNamespace(name="NVIDIA H200", total_memory=GIB, major=9, minor=0, multi_processor_count=132, uuid=uuid)

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * MIB, GIB))
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_gpus_with_free_memory_by_uuid(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch, UUIDS[::-1])  # the driver's order need not be CUDA's
    fake_torch(monkeypatch, gpus=2)
    found = inventory()
    assert [(g.index, g.memory_free, g.uuid) for g in found.gpus] == [(0, 3 * MIB, UUIDS[0]), (1, 2 * MIB, UUIDS[1])]
    assert found.gpus[0].capability == (9, 0)
    assert (found.driver, found.gpu_error, found.versions["cuda"]) == ("535.54", None, "13.0")


def test_free_memory_from_torch_where_nvml_does_not_know_the_gpu(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch, ("GPU-other",))
    fake_torch(monkeypatch, gpus=1)
    assert inventory().gpus[0].memory_free == 7 * MIB


def test_a_lost_gpu_is_not_counted(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch, lost=1)
    view = hardware.nvml_view()
    assert view is not None
    assert view.visible == 2


def test_torch_without_cuda_beside_gpus_is_explained(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch)
    fake_torch(monkeypatch, gpus=0, cuda=None)
    found = inventory()
    assert found.gpus == ()
    what, fix = (found.gpu_error or "").split("\n")
    assert "shows 3 GPU(s)" in what
    assert "without CUDA" in what
    assert "install a build with CUDA" in fix


def test_a_driver_too_old_is_explained(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch)
    fake_torch(monkeypatch, gpus=0, warning="The NVIDIA driver on your system is too old (found version 12020).\nmore")
    what, fix = (inventory().gpu_error or "").split("\n")
    assert "535.54" in what
    assert "too old" in what
    assert "update the NVIDIA driver to one that supports CUDA 13.0" in fix


def test_gpus_hidden_by_the_user_are_no_error(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch)
    fake_torch(monkeypatch, gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inventory().gpu_error is None


def test_torch_that_cannot_be_imported_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = inventory()
    assert "torch" not in found.versions
    assert "cannot be imported" in (found.gpu_error or "")
    assert "pip install" in (found.gpu_error or "")


def test_other_processes_on_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch)
    assert hardware.gpu_processes(UUIDS[1]) == (f"a process (pid {2**22 + 1}, 3.0 GiB)",)


def test_without_nvml_nobody_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert hardware.nvml_view() is None
    assert hardware.gpu_processes(UUIDS[0]) == ()


# --- launchers


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "8"}, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "many"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}, "deepspeed"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "a distributed launcher"),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], launcher: str | None):
    assert launched_by(environment) == launcher


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launched_by() == "torchrun"
