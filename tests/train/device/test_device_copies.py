"""Tests of the choice of batches that are copied to the device early. GPU tests run the copies."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from orchestrator.train.device import batches
from orchestrator.train.device.batches import MoveToDevice, start_copy

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_a_batch_for_the_cpu_is_fetched_as_it_is() -> None:
    batch = {"x": torch.ones(2), "names": ["a", "b"]}
    fetched = start_copy(batch, CPU)()
    assert fetched["x"] is batch["x"]
    assert fetched["names"] == ["a", "b"]


def test_a_batch_that_hides_tensors_is_not_copied_early() -> None:
    """The stream of the copy would reuse their memory while the step still reads it."""

    class Encoding(UserDict[str, Any]):
        def to(self, device: torch.device) -> Encoding:
            return Encoding({key: value.to(device) for key, value in self.items()})

    batch = (torch.ones(2), Encoding(x=torch.ones(2)))
    assert isinstance(start_copy(batch, GPU), MoveToDevice)


def test_a_batch_that_is_not_on_the_host_is_not_copied_early() -> None:
    """The stream of the copy would not wait for the work that computes it."""
    batch = (torch.ones(2), torch.ones(2, device="meta"))
    assert isinstance(start_copy(batch, GPU), MoveToDevice)


def test_a_batch_without_memory_is_copied_when_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __enter__(self) -> None:
            raise torch.OutOfMemoryError("injected")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(batches, "_copy_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: Stream())
    assert isinstance(start_copy([torch.ones(2)], GPU), MoveToDevice)
