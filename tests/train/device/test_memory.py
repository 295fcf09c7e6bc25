"""Cached blocks of a GPU go back to its driver at the end of an epoch, where there are many."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.runs.loop_runs import run_loop
from orchestrator.train.device.memory import release_idle
from orchestrator.train.loop import loop as loop_module


@pytest.mark.parametrize(("reserved", "is_freed"), [(59, False), (61, True)])
def test_many_idle_blocks_are_returned(
    monkeypatch: pytest.MonkeyPatch, reserved: int, is_freed: bool
) -> None:
    """A tenth of the memory may stay idle."""
    freed: list[bool] = []
    for name, value in (("memory_reserved", reserved), ("memory_allocated", 50)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    release_idle(torch.device("cpu"))
    assert freed == []
    release_idle(torch.device("cuda"))
    assert freed == [True] * is_freed


def test_idle_blocks_are_looked_at_after_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(loop_module, "release_idle", devices.append)
    run_loop(tmp_path, epochs=3, batch_size=1000)
    assert devices == [torch.device("cpu")] * 3
