"""Costs fitted to measured times."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.measure.calibration.link_bandwidth import fit_link
from orchestrator.measure.calibration.timer import fit_nonnegative


def test_a_link_is_recovered_from_its_times() -> None:
    sizes = (2**10, 2**17, 2**23)
    link = fit_link("shared memory", {size: 1e-4 + size / 2e9 for size in sizes})
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((1e-4, 2e9), rel=1e-6)


def test_exact_coefficients_are_recovered_and_none_is_negative() -> None:
    rows = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 1.0]])
    assert fit_nonnegative(rows, rows @ np.array([2.0, 1.0])) == pytest.approx([2.0, 1.0])
    coefficients = fit_nonnegative(rows, np.array([0.5, 2.0, 3.2]))
    assert min(coefficients) >= 0
    assert coefficients[1] == 0.0


def test_relative_errors_count_so_that_short_times_are_fitted_too() -> None:
    rows = np.array([[1.0], [1.0]])
    (value,) = fit_nonnegative(rows, np.array([1.0, 100.0]))
    assert value == pytest.approx((1 + 1 / 100) / (1 + 1 / 100**2))
