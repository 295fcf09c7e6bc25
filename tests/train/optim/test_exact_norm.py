"""The norm of gradients whose bits do not depend on shards, against a sum of exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.hosts.group import Group
from orchestrator.train.optim.gradient_norm import exact_square

CPU = torch.device("cpu")


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((37, 11), (5,), (3, 2, 7), (40_000,), ())
    scales = (1e-6, 1.0, 100.0, 1e-3, 1e-30)
    return [
        torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, scales, strict=True)
    ]


def test_the_square_is_that_of_exact_fractions() -> None:
    expected = sum(
        (Fraction(value) ** 2 for each in gradients() for value in each.flatten().tolist()), Fraction()
    )
    assert math.isclose(float(exact_square(gradients(), CPU)), float(expected), rel_tol=1e-9)


class OneByOne(Group):
    """Workers that call one after another: the last one gets the sum of all."""

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__(0, 1, None)
        self._largest = max(float(each.double().abs().max()) for each in gradients)
        self._total: Tensor | None = None

    def all_reduce_max(self, tensor: Tensor) -> Any:
        tensor.fill_(self._largest)
        return Future()

    def all_reduce(self, tensor: Tensor) -> Any:
        self._total = tensor.clone() if self._total is None else self._total + tensor
        tensor.copy_(self._total)
        return Future()


class Future:
    def wait(self) -> None:
        pass


def by_shards(gradients: list[Tensor], workers: int) -> Tensor:
    """Return the square by shards of rows, of which the last ones may be empty."""
    group = OneByOne(gradients)
    square = torch.zeros(())
    for rank in range(workers):
        rows = [-(-len(each) // workers) for each in gradients]
        shards = [
            each[count * rank : count * (rank + 1)] for each, count in zip(gradients, rows, strict=True)
        ]
        square = exact_square(shards, CPU, group)
    return square


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("workers", [2, 3, 7, 64])
def test_a_division_into_shards_leaves_the_bits(dtype: torch.dtype, workers: int) -> None:
    whole = [each.to(dtype) for each in gradients() if each.ndim]
    assert exact_square(whole, CPU) == by_shards(whole, workers)


def test_sums_in_floating_point_depend_on_the_shards() -> None:
    whole = gradients()[3]
    sums = {float(sum(part.square().sum() for part in whole.chunk(workers))) for workers in range(1, 20)}
    assert len(sums) > 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 0.0], 0.0), ([3.0, -4.0], 25.0), ([1e-45], 1e-90), ([], 0.0)],
)
def test_small_cases(values: list[float], expected: float) -> None:
    gradient = torch.tensor(values, dtype=torch.float64)
    assert float(exact_square([gradient], CPU)) == pytest.approx(expected, rel=1e-8, abs=0)
    assert gradient.tolist() == values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_the_norm_of_a_gradient_that_is_none(value: float) -> None:
    assert exact_square([torch.tensor([1.0, value]), torch.ones(3)], CPU).isnan()


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert float(exact_square([], CPU)) == 0.0
