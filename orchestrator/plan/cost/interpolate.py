"""Interpolation between measured values: seconds by size, on logarithmic scales. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PiecewiseCurve:
    """Values by size.

    A power law between two sizes, constant below the first, and proportional to the size past the
    last.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.values):
            raise ValueError(
                f"a curve has {len(self.sizes)} sizes and {len(self.values)} values; "
                f"it needs the same number of each, at least one"
            )
        if min(self.sizes) <= 0 or min(self.values) < 0 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                "the sizes of a curve must be above 0 and increase, and its values must not be below 0"
            )

    @property
    def floor(self) -> float:
        return self.values[0]

    def at(self, size: float) -> float:
        index, fraction = _locate(self.sizes, size)
        if fraction is None:
            return self.values[-1] * size / self.sizes[-1]
        low = self.values[index]
        high = self.values[min(index + 1, len(self.values) - 1)]
        # A power law has no zero: interpolate linearly next to one.
        return low ** (1 - fraction) * high**fraction if low and high else low + fraction * (high - low)


@dataclass(frozen=True)
class PiecewiseGrid:
    """Seconds of a product of (m × k) by (k × n): a piecewise curve along each of the three
    sizes."""

    m: tuple[float, ...]
    k: tuple[float, ...]
    n: tuple[float, ...]
    seconds: tuple[float, ...]
    """Values in row-major order: n changes fastest."""

    def __post_init__(self) -> None:
        num_points = len(self.m) * len(self.k) * len(self.n)
        if len(self.seconds) != num_points or not self.seconds or min(self.seconds) <= 0:
            raise ValueError(
                f"a grid of {len(self.m)} × {len(self.k)} × {len(self.n)} sizes has "
                f"{len(self.seconds)} values; "
                "it needs one above 0 for each point"
            )

    @cached_property
    def _logs(self) -> tuple[float, ...]:
        return tuple(math.log(value) for value in self.seconds)

    def at(self, m: float, k: float, n: float) -> float:
        """Return the seconds of a product, proportional past the last size and constant below the
        first."""
        factor = 1.0
        # Indices of the surrounding grid points with their weights; each axis doubles them at
        # most.
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for sizes, size in ((self.m, m), (self.k, k), (self.n, n)):
            index, fraction = _locate(sizes, size)
            if fraction is None:
                factor *= size / sizes[-1]
                index = len(sizes) - 1
                fraction = 0.0
            ends = [(index, 1 - fraction), (index + 1, fraction)]
            corners = [
                (corner * len(sizes) + end, weight * part)
                for corner, weight in corners
                for end, part in ends
                if part
            ]
        log_seconds = 0.0
        for corner, weight in corners:
            log_seconds += weight * self._logs[corner]
        return factor * math.exp(log_seconds)


def as_floats(sizes: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, sizes))


def _locate(sizes: Sequence[float], size: float) -> tuple[int, float | None]:
    """Return the index of the size below, and the fraction of the way to the next; None past the
    last."""
    if size <= sizes[0]:
        return 0, 0.0
    if size > sizes[-1]:
        return len(sizes) - 1, None
    index = min(bisect_right(sizes, size) - 1, len(sizes) - 2)
    return index, math.log(size / sizes[index]) / math.log(sizes[index + 1] / sizes[index])
