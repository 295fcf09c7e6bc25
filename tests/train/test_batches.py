"""Tests of slicing, moving and checking nested batches."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from orchestrator.errors import UserError
from orchestrator.train.batches import check_batch_device, slice_batch, to_device

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_lists_of_samples_and_lists_of_fields_are_sliced() -> None:
    images = [torch.zeros(3, width) for width in (4, 5, 6, 7)]
    targets = [{"n": n} for n in range(4)]
    sliced_images, sliced_targets = slice_batch((images, targets), 2, 4, 4)
    assert [image.shape[1] for image in sliced_images] == [6, 7]
    assert [target["n"] for target in sliced_targets] == [2, 3]
    fields = slice_batch([torch.arange(4), torch.arange(8).view(4, 2)], 1, 3, 4)
    assert [field.shape[0] for field in fields] == [2, 2]


def test_a_nested_batch_is_sliced_and_moved() -> None:
    batch = {
        "x": torch.arange(6),
        "names": list("abcdef"),
        "pair": (torch.arange(12).view(6, 2), torch.tensor(3.0)),
        "named": Pair(torch.arange(6), torch.zeros(2)),
        "k": 7,
    }
    part = to_device(slice_batch(batch, 2, 5, 6), CPU, pin=False)
    assert part["x"].tolist() == [2, 3, 4]
    assert part["names"] == ["c", "d", "e"]
    assert part["pair"][0].shape == (3, 2)
    assert part["pair"][1] == 3.0
    assert isinstance(part["named"], Pair)
    assert part["named"].x.tolist() == [2, 3, 4]
    assert part["named"].y.tolist() == [0.0, 0.0]
    assert part["k"] == 7


def test_a_batch_on_another_device_is_refused() -> None:
    check_batch_device({"x": torch.zeros(2)}, CPU)
    with pytest.raises(UserError, match="is on meta; the model is on cpu"):
        check_batch_device([{"x": torch.zeros(2)}, (torch.zeros(2, device="meta"),)], CPU)
