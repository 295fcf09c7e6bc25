"""Costs fitted to measured times, none of them negative."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import nnls

from orchestrator.plan.cost.machine import Link, LinkKind

_SHORTEST_S = 1e-9  # a time of zero would have an infinite weight


def fit_nonnegative(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Return the coefficients of the columns, none below zero, with the least squares of relative
    errors."""
    scale = 1.0 / np.maximum(values, _SHORTEST_S)
    coefficients, _ = nnls(rows * scale[:, None], values * scale)
    return [float(value) for value in coefficients]


def fit_link(kind: LinkKind, seconds: Mapping[int, float]) -> Link:
    """Return the link whose latency and bandwidth explain the seconds by message size best."""
    sizes = np.array(list(seconds), float)
    values = np.array(list(seconds.values()))
    latency_s, seconds_per_byte = fit_nonnegative(np.stack([np.ones_like(sizes), sizes], 1), values)
    return Link(kind, latency_s, 1.0 / max(seconds_per_byte, 1e-13))
