"""The driver's view of the GPUs, from a fake NVML."""

from __future__ import annotations

import sys

import pytest

from harness.fakes.fake_gpus import OTHER_PID, UUIDS, patch_nvml
from orchestrator.plan.inventory.gpus import count_visible, gpu_processes, nvml_view
from orchestrator.plan.inventory.hardware import num_visible


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
def test_visible_gpus_follow_the_rules_of_cuda(visible: str | None, count: int | None):
    assert count_visible(UUIDS, visible) == count


def test_a_lost_gpu_is_not_counted(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch, lost=1)
    assert num_visible(nvml_view()) == 2


def test_other_processes_on_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch):
    patch_nvml(monkeypatch)
    assert gpu_processes(UUIDS[1]) == (f"a process (pid {OTHER_PID}, 3.0 GiB)",)


def test_without_nvml_there_is_no_view(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_view() is None
    assert num_visible(None) is None
    assert gpu_processes(UUIDS[0]) == ()
