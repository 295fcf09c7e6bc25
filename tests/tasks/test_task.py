"""Tests of the data of tasks."""

from __future__ import annotations

import pytest
import torch

from orchestrator.tasks.task import TensorData, WindowData


def test_a_batch_of_tensors_is_a_tuple_of_their_rows() -> None:
    data = TensorData(torch.arange(4), torch.arange(8).view(4, 2))
    numbers, pairs = data.gather(torch.tensor([3, 1]))
    assert numbers.tolist() == [3, 1]
    assert pairs.tolist() == [[6, 7], [2, 3]]
    assert data.nbytes == 12 * 8
    with pytest.raises(ValueError, match=r"lengths \[4, 3\]"):
        TensorData(torch.zeros(4), torch.zeros(3))


def test_windows_cover_the_text_once() -> None:
    data = WindowData(torch.arange(101, dtype=torch.uint8), 10)
    batch = data.gather(torch.arange(len(data)))
    assert batch.shape == (10, 11)
    assert batch[:, 1:].flatten().tolist() == list(range(1, 101))
    with pytest.raises(ValueError, match="no window"):
        WindowData(torch.zeros(5), 10)
