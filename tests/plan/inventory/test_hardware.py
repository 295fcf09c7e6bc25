"""The inventory against machines that are not here: torch and NVML are stand-ins."""

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

from orchestrator.plan.inventory import hardware
from orchestrator.plan.inventory.hardware import Gpu, Inventory, count_visible, inventory, launched_by
from orchestrator.types import GIB, MIB

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")


def gpu(index: int = 0, name: str = "NVIDIA H200", total: int = 140 * GIB) -> Gpu:
    return Gpu(index, name, total, total, (9, 0), 132, UUIDS[index])


def machine(*gpus: Gpu) -> Inventory:
    return Inventory(
        gpus, 8, 32 * GIB, 16 * GIB, "a CPU", "x86_64", False, "580.1", {"torch": "2.13.0"}, None, GIB
    )


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


def fake_nvml(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...] = UUIDS, lost: int | None = None
) -> None:
    def handle(index: int) -> int:
        if index == lost:
            raise FakeNvmlError
        return index

    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
        SimpleNamespace(pid=2**22 + 1, usedGpuMemory=3 * GIB),
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


def fake_torch(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cuda: str | None = "13.0", warning: str = ""
) -> None:
    import torch

    def available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return gpus > 0

    def properties(index: int) -> Any:
        uuid = UUIDS[index].removeprefix("GPU-")
        return SimpleNamespace(
            name="NVIDIA H200", total_memory=GIB, major=9, minor=0, multi_processor_count=132, uuid=uuid
        )

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * MIB, GIB))
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_gpus_with_free_memory_by_uuid(monkeypatch: pytest.MonkeyPatch):
    fake_nvml(monkeypatch, UUIDS[::-1])  # the driver's order need not be CUDA's
    fake_torch(monkeypatch, gpus=2)
    found = inventory()
    assert [(g.index, g.memory_free, g.uuid) for g in found.gpus] == [
        (0, 3 * MIB, UUIDS[0]),
        (1, 2 * MIB, UUIDS[1]),
    ]
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
    fake_torch(
        monkeypatch,
        gpus=0,
        warning="The NVIDIA driver on your system is too old (found version 12020).\nmore",
    )
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
        (
            {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"},
            "deepspeed",
        ),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "a distributed launcher"),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], launcher: str | None):
    assert launched_by(environment) == launcher


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launched_by() == "torchrun"
