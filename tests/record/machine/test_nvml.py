"""Tests of reading NVML by index and by UUID; values that NVML lacks are None."""

import sys

import pytest

from harness.fakes.fake_nvml import fake_nvml
from orchestrator.record.machine.nvml import DeviceSample, NvmlGpus
from orchestrator.types import GIB


def test_gpus_are_read_by_index_and_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    gpus = NvmlGpus((0, "GPU-bbbb"))
    assert gpus.error is None
    first, second = gpus.read()
    assert second.index == 1
    assert first == DeviceSample(0, "Card 0", 4 * GIB, 80 * GIB, 3 * GIB, 0, 7, 61, 250.0)


def test_values_that_nvml_lacks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "Name",
        "MemoryInfo",
        "UtilizationRates",
        "PowerUsage",
        "Temperature",
        "ComputeRunningProcesses",
        "Index",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(tuple(f"nvmlDeviceGet{name}" for name in names)))
    assert NvmlGpus(("GPU-aaaa",)).read() == (DeviceSample(0),)
