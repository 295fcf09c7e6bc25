"""Interpolation between measured values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.cost.interpolate import PiecewiseCurve
from tests.support.cost_machines import FLOPS_PER_S, device


def test_a_curve_is_a_power_law_between_sizes_and_proportional_past_the_last():
    curve = PiecewiseCurve((10.0, 1000.0), (1.0, 100.0))
    values = [curve.at(size) for size in (1, 10, 100, 1000, 2000)]
    assert values == pytest.approx([1.0, 1.0, 10.0, 100.0, 200.0])


def test_the_sizes_of_a_curve_must_increase():
    with pytest.raises(ValueError, match="must be above 0 and increase"):
        PiecewiseCurve((2.0, 1.0), (1.0, 1.0))


@given(st.floats(1, 1e7), st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_grid_of_a_power_law_is_exact(m: float, k: float, n: float):
    grid = device().products["fp32"]["nn"]
    assert grid.at(m, k, n) == pytest.approx(2 * m * k * n / FLOPS_PER_S)
