"""Figures that explain measured times: fitted, with none of them below zero."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from orchestrator.plan.cost.machine import Link, LinkKind


def not_negative(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Least squares of relative errors, with no figure below zero: those that would be are left out, one after another."""
    scale = 1.0 / np.maximum(values, 1e-9)
    kept = list(range(rows.shape[1]))
    found = [0.0] * rows.shape[1]
    while kept:
        solved = np.linalg.lstsq(rows[:, kept] * scale[:, None], values * scale, rcond=None)[0]
        if solved.min() >= 0:
            for place, value in zip(kept, solved, strict=True):
                found[place] = float(value)
            break
        del kept[int(solved.argmin())]
    return found


def fitted_link(kind: LinkKind, seconds: Mapping[int, float]) -> Link:
    """Latency and bandwidth that explain the times best, each error in proportion."""
    sizes, values = np.array(list(seconds), float), np.array(list(seconds.values()))
    latency, per_byte = not_negative(np.stack([np.ones_like(sizes), sizes], 1), values)
    return Link(kind, latency, 1.0 / max(per_byte, 1e-13))
