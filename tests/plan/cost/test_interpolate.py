"""Interpolation between measured values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.cost_machines import FLOPS_PER_S, device
from orchestrator.plan.cost.interpolate import PiecewiseCurve, PiecewiseGrid


def test_a_curve_is_a_power_law_between_sizes_and_proportional_past_the_last():
    curve = PiecewiseCurve((10.0, 1000.0), (1.0, 100.0))
    values = [curve.at(size) for size in (1, 10, 100, 1000, 2000)]
    assert values == pytest.approx([1.0, 1.0, 10.0, 100.0, 200.0])


def test_each_piece_of_a_curve_has_its_own_power_law():
    curve = PiecewiseCurve((1.0, 4.0, 16.0, 64.0), (1.0, 2.0, 32.0, 32.0))
    values = [curve.at(size) for size in (1, 2, 4, 8, 16, 32, 64, 65)]
    assert values == pytest.approx([1.0, 2**0.5, 2.0, 8.0, 32.0, 32.0, 32.0, 32.5])
    assert curve.floor == 1.0


def test_a_curve_is_linear_in_the_logarithm_next_to_a_zero():
    curve = PiecewiseCurve((1.0, 4.0, 16.0), (0.0, 6.0, 0.0))
    assert [curve.at(size) for size in (1, 2, 4, 8, 16)] == pytest.approx([0.0, 3.0, 6.0, 3.0, 0.0])


def test_one_size_is_a_constant_up_to_it_and_proportional_past_it():
    curve = PiecewiseCurve((4.0,), (3.0,))
    assert [curve.at(size) for size in (1, 4, 8)] == [3.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("sizes", "values"),
    [((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 1.0)), ((0.0, 1.0), (1.0, 1.0)), ((1.0, 2.0), (1.0, -1.0))],
)
def test_the_sizes_of_a_curve_must_increase(sizes: tuple[float, ...], values: tuple[float, ...]):
    with pytest.raises(ValueError, match="must be above 0 and increase"):
        PiecewiseCurve(sizes, values)


@pytest.mark.parametrize(("sizes", "values"), [((), ()), ((1.0,), ()), ((1.0,), (1.0, 2.0))])
def test_a_curve_has_a_value_for_each_size(sizes: tuple[float, ...], values: tuple[float, ...]):
    with pytest.raises(ValueError, match=f"has {len(sizes)} sizes and {len(values)} values"):
        PiecewiseCurve(sizes, values)


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_grid_has_a_value_above_zero_for_each_point(seconds: tuple[float, ...]):
    PiecewiseGrid((1.0,), (1.0, 2.0), (1.0,), (1.0, 1e-9))
    with pytest.raises(ValueError, match=f"a grid of 1 × 2 × 1 sizes has {len(seconds)} values"):
        PiecewiseGrid((1.0,), (1.0, 2.0), (1.0,), seconds)


def test_a_grid_without_sizes_is_refused():
    with pytest.raises(ValueError, match="a grid of 0 × 1 × 1 sizes has 0 values"):
        PiecewiseGrid((), (1.0,), (1.0,), ())


def test_a_grid_is_exact_at_its_points_and_a_power_law_between_them():
    """Values that no power law of all three sizes gives: each axis has its own indices."""
    seconds = tuple(float(number) for number in range(1, 13))
    grid = PiecewiseGrid((1.0, 4.0), (1.0, 4.0, 16.0), (1.0, 4.0), seconds)
    points = [(m, k, n) for m in (1, 4) for k in (1, 4, 16) for n in (1, 4)]
    assert [grid.at(*point) for point in points] == pytest.approx(seconds)
    assert grid.at(1, 2, 1) == pytest.approx((1 * 3) ** 0.5)
    assert grid.at(1, 8, 4) == pytest.approx((4 * 6) ** 0.5)
    assert grid.at(2, 1, 2) == pytest.approx((1 * 2 * 7 * 8) ** 0.25)
    assert grid.at(0.5, 0.5, 0.5) == pytest.approx(1.0)
    assert grid.at(8, 48, 12) == pytest.approx(12 * 2 * 3 * 3)
    assert grid.at(8, 1, 1) == pytest.approx(7 * 2)


@given(st.floats(1, 1e7), st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_grid_of_a_power_law_is_exact(m: float, k: float, n: float):
    grid = device().products["fp32"]["nn"]
    assert grid.at(m, k, n) == pytest.approx(2 * m * k * n / FLOPS_PER_S)
