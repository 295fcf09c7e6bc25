"""The order of streams around a warm-up, with streams that only note it. GPU tests capture graphs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from orchestrator.train.step_graph.recorder import CudaRecorder


class _Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self._notes = notes

    def wait_stream(self, other: _Stream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_the_current_stream_waits_for_the_warm_up(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    current = _Stream("current", notes)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: _Stream("own", notes))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def work() -> int:
        notes.append("work")
        if fails:
            raise torch.OutOfMemoryError("injected")
        return 3

    recorder = CudaRecorder(torch.device("cuda", 0))
    outcome: Any = None
    try:
        outcome = recorder.warm_up(work)
    except torch.OutOfMemoryError as error:
        outcome = str(error)
    assert outcome == ("injected" if fails else 3)
    assert notes == ["own waits for current", "work", "current waits for own"]
