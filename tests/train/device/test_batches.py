"""Tests of slicing, moving and checking nested batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from orchestrator.errors import UserError
from orchestrator.train.device.batches import check_batch_device, slice_batch, to_device

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_lists_of_samples_and_lists_of_fields_are_sliced() -> None:
    images = [torch.zeros(3, width) for width in (4, 5, 6, 7)]
    targets = [{"n": n} for n in range(4)]
    sliced_images, sliced_targets = slice_batch((images, targets), 2, 4, 4)
    assert [image.shape[1] for image in sliced_images] == [6, 7]
    assert [target["n"] for target in sliced_targets] == [2, 3]
    fields = slice_batch([torch.arange(4), torch.arange(8).view(4, 2)], 1, 3, 4)
    assert [field.shape[0] for field in fields] == [2, 2]


def test_a_list_as_long_as_the_batch_holds_fields_if_all_are_as_long_too() -> None:
    fields = slice_batch([torch.arange(2), torch.arange(4).view(2, 2)], 1, 2, 2)
    assert [field.tolist() for field in fields] == [[1], [[2, 3]]]
    scalars = slice_batch([torch.tensor(5), torch.tensor(6)], 1, 2, 2)
    assert [int(scalar) for scalar in scalars] == [6]
    mixed = slice_batch([torch.arange(2), torch.arange(3)], 1, 2, 2)
    assert [sample.tolist() for sample in mixed] == [[0, 1, 2]]


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


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that pin or copy a tensor; none is carried out, so that no GPU is needed."""
    calls: list[tuple[Any, ...]] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        calls.append(("pin",))
        return tensor

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        calls.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    return calls


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        ("cpu", "cpu", False),
        ("cpu", "cpu:0", False),
        ("meta", "meta", False),
        ("meta", "meta:1", True),
        ("meta", "cpu", True),
        ("cpu", "meta", True),
    ],
)
def test_only_a_tensor_on_another_device_is_copied(
    copies: list[tuple[Any, ...]], source: str, target: str, moves: bool
) -> None:
    batch = torch.zeros(3, 2, device=source).t()
    moved = to_device(batch, torch.device(target), pin=True)
    assert moved.is_contiguous()
    assert copies == ([(target, True)] if moves else [])


@pytest.mark.parametrize("pin", [True, False])
def test_host_memory_is_pinned_for_a_gpu_alone(copies: list[tuple[Any, ...]], pin: bool) -> None:
    to_device([torch.zeros(2)], torch.device("cuda", 1), pin)
    assert copies == [*([("pin",)] if pin else []), ("cuda:1", True)]


def test_a_batch_with_its_own_way_to_move_uses_it() -> None:
    class Graph:
        def to(self, device: torch.device) -> str:
            return f"graph on {device}"

    assert to_device({"graph": Graph(), "name": "a"}, CPU, pin=False) == {
        "graph": "graph on cpu",
        "name": "a",
    }


def test_a_batch_on_another_device_is_refused() -> None:
    check_batch_device({"x": torch.zeros(2)}, CPU)
    with pytest.raises(UserError, match="is on meta; the model is on cpu"):
        check_batch_device([{"x": torch.zeros(2)}, (torch.zeros(2, device="meta"),)], CPU)


def test_the_index_of_a_device_counts_where_the_model_has_one() -> None:
    class OnSecondGpu(Tensor):
        device = torch.device("cuda", 1)

    batch = {"x": torch.zeros(2).as_subclass(OnSecondGpu)}
    check_batch_device(batch, torch.device("cuda"))
    check_batch_device(batch, torch.device("cuda", 1))
    with pytest.raises(UserError, match="is on cuda:1; the model is on cuda:0"):
        check_batch_device(batch, torch.device("cuda", 0))
