"""GPUs as torch sees them, with a fake torch and a fake NVML."""

from __future__ import annotations

import sys

import pytest

from harness.fakes.fake_gpus import UUIDS, patch_nvml, patch_torch
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.types import MIB


def test_free_memory_is_found_by_uuid(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch, UUIDS[::-1])  # the driver's order need not be CUDA's
    patch_torch(monkeypatch, gpus=2)
    machine = inventory()
    gpus = [(gpu.index, gpu.memory_free, gpu.uuid) for gpu in machine.gpus]
    assert gpus == [(0, 3 * MIB, UUIDS[0]), (1, 2 * MIB, UUIDS[1])]
    assert machine.gpus[0].capability == (9, 0)
    assert (machine.driver, machine.gpu_error, machine.versions["cuda"]) == ("535.54", None, "13.0")


def test_free_memory_of_a_gpu_unknown_to_nvml_is_that_of_torch(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch, ("GPU-other",))
    patch_torch(monkeypatch, gpus=1)
    assert inventory().gpus[0].memory_free == 7 * MIB


def test_a_torch_without_cuda_on_a_machine_with_gpus_is_explained(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch)
    patch_torch(monkeypatch, gpus=0, cuda=None)
    machine = inventory()
    assert machine.gpus == ()
    problem, fix = (machine.gpu_error or "").split("\n")
    assert "shows 3 GPU(s)" in problem
    assert "without CUDA" in problem
    assert "install a build with CUDA" in fix


def test_a_driver_that_is_too_old_is_explained(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch)
    warning = "The NVIDIA driver on your system is too old (found version 12020).\nmore"
    patch_torch(monkeypatch, gpus=0, warning=warning)
    problem, fix = (inventory().gpu_error or "").split("\n")
    assert "535.54" in problem
    assert "too old" in problem
    assert "update the NVIDIA driver to one that supports CUDA 13.0" in fix


def test_gpus_hidden_by_the_user_are_no_error(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch)
    patch_torch(monkeypatch, gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inventory().gpu_error is None


def test_a_torch_that_cannot_be_imported_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    machine = inventory()
    assert "torch" not in machine.versions
    assert "cannot be imported" in (machine.gpu_error or "")
    assert "pip install" in (machine.gpu_error or "")
