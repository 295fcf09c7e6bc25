"""Timed work ends when the device has finished it."""

from __future__ import annotations

from time import sleep

import pytest
import torch

from orchestrator.train.device.clock import synchronize, timed_seconds


def test_seconds_include_the_work() -> None:
    assert timed_seconds(lambda: sleep(0.02), torch.device("cpu")) >= 0.02


def test_the_clock_stops_after_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: sleep(0.02) or calls.append("synchronized"))
    seconds = timed_seconds(lambda: calls.append("ran"), torch.device("cuda", 0))
    assert calls == ["ran", "synchronized"]
    assert seconds >= 0.02


def test_a_cpu_is_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("synchronized a CPU"))
    synchronize(torch.device("cpu"))
    synchronize(None)
