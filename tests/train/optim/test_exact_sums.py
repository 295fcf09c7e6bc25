"""Exact sums of gradients, and the grid that they are rounded to."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from orchestrator.train.optim.exact_sums import ExactSums

CPU = torch.device("cpu")


def summed(sums: ExactSums, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, str | None]:
    """Return the sum of one attempt, and why it must be repeated."""
    # Weights of experts are in fp32 or wider, whatever their products are in.
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    parameter = nn.Parameter(torch.zeros_like(gradients[0], dtype=dtype))
    sums.begin()
    for gradient in gradients:
        sums.add(parameter, gradient)
    largest = float(sums.largest(CPU))
    total, square_1 = sums.take(parameter, by_row=False)
    return total, sums.why_repeat(largest, float(square_1.sqrt()))


def settled(sums: ExactSums, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the attempt that counts; there are few before it."""
    for _ in range(4):
        total, reason = summed(sums, gradients)
        if reason is None:
            return total
    raise AssertionError(f"the step is repeated for ever: {reason}")


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=2, max_size=5))
def test_a_sum_has_the_same_bits_in_any_order_and_is_that_of_fractions(rows: list[list[float]]) -> None:
    gradients = [torch.tensor(row) for row in rows]
    found = [settled(ExactSums(), list(order)) for order in itertools.permutations(gradients)]
    assert all(torch.equal(each, found[0]) for each in found)
    exact = [sum(Fraction(row[column]) for row in rows) for column in range(3)]
    # The grid ends 40 bits below the norm; fp32 has 24.
    allowed = 2**-22 * max((abs(value) for value in exact), default=Fraction(0)) + Fraction(1, 2**30)
    assert all(abs(Fraction(float(a)) - b) <= allowed for a, b in zip(found[0], exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_any_type_are_added_up(dtype: torch.dtype) -> None:
    """Experts hand over their gradients in the type of autocast."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 1e3):
        gradients = [torch.randn(41, generator=generator).mul(scale).to(dtype) for _ in range(3)]
        expected = torch.stack(gradients).double().sum(0).float()
        total = settled(ExactSums(), gradients)
        torch.testing.assert_close(total.float(), expected, rtol=1e-6, atol=1e-6 * scale)


def test_gradients_may_grow_and_shrink_by_any_factor_between_two_steps() -> None:
    sums = ExactSums()
    for scale in (1.0, 1e13, 1.0, 1e-13, 1e-30, 1e20):
        gradients = [torch.tensor([1.0, -2.0, 3.0]) * scale, torch.tensor([4.0, 5.0, -6.0]) * scale]
        torch.testing.assert_close(settled(sums, gradients), gradients[0] + gradients[1], rtol=1e-6, atol=0)


def test_a_sum_that_cancels_is_zero_and_no_reason_to_repeat() -> None:
    sums = ExactSums()
    gradient = torch.tensor([1.0, -2.0])
    assert settled(sums, [gradient, -gradient]).tolist() == [0.0, 0.0]
    assert settled(sums, [gradient, gradient]).tolist() == [2.0, -4.0]


def test_a_gradient_that_is_no_number_ends_no_attempt_and_keeps_the_grid() -> None:
    sums = ExactSums()
    settled(sums, [torch.tensor([1.0, 2.0])])
    before = sums.exponent
    _, reason = summed(sums, [torch.tensor([1.0, float("nan")])])
    assert reason is None
    assert sums.exponent == before


def test_a_transposed_parameter_gets_a_gradient_with_its_strides() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2).t())
    sums = ExactSums()
    sums.add(parameter, torch.arange(6.0).view(2, 3))
    gradient, _ = sums.take(parameter, by_row=False)
    assert gradient.stride() == parameter.stride()
    assert gradient.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_the_norms_of_rows_are_not_rounded_to_a_short_type() -> None:
    """A square counts in the norm that gradients are clipped by."""
    parameter = nn.Parameter(torch.zeros(3, 37, dtype=torch.bfloat16))
    gradient = torch.randn(3, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums = ExactSums()
    sums.add(parameter, gradient)
    value, squares_3 = sums.take(parameter, by_row=True)
    assert torch.equal(value, gradient)
    torch.testing.assert_close(squares_3, gradient.double().square().sum(1), rtol=1e-6, atol=0)
