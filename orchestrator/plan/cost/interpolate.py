"""Measured figures between which one can read: seconds by size, on logarithmic scales. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PiecewiseCurve:
    """Values by size. Between two sizes a power law; past the last one in proportion to it, below
    the first one constant."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.values):
            raise ValueError(
                f"a curve of {len(self.sizes)} sizes and {len(self.values)} values; as many of each, and at least one, were needed"
            )
        if min(self.sizes) <= 0 or min(self.values) < 0 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                "the sizes of a curve must be above 0 and rise, and its values must not be below 0"
            )

    @property
    def floor(self) -> float:
        return self.values[0]

    def at(self, size: float) -> float:
        place, share = _between(self.sizes, size)
        if share is None:  # past the end
            return self.values[-1] * size / self.sizes[-1]
        low, high = self.values[place], self.values[min(place + 1, len(self.values) - 1)]
        return low ** (1 - share) * high**share if low and high else low + share * (high - low)


@dataclass(frozen=True)
class PiecewiseGrid:
    """Seconds of a product of (m × k) by (k × n), by all three: read like a curve along each."""

    m: tuple[float, ...]
    k: tuple[float, ...]
    n: tuple[float, ...]
    seconds: tuple[float, ...]
    """The last size changes fastest."""

    def __post_init__(self) -> None:
        if (
            len(self.seconds) != len(self.m) * len(self.k) * len(self.n)
            or not self.seconds
            or min(self.seconds) <= 0
        ):
            raise ValueError(
                f"a grid of {len(self.m)} × {len(self.k)} × {len(self.n)} sizes has {len(self.seconds)} values; "
                "one above 0 for each was needed"
            )

    @cached_property
    def _logs(self) -> tuple[float, ...]:
        return tuple(math.log(value) for value in self.seconds)

    def at(self, m: float, k: float, n: float) -> float:
        """Past an end in proportion, below the beginning as there."""
        total, factor = 0.0, 1.0
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for sizes, size in ((self.m, m), (self.k, k), (self.n, n)):
            place, share = _between(sizes, size)
            if share is None:
                factor *= size / sizes[-1]
                place, share = len(sizes) - 1, 0.0
            ends = [(place, 1 - share), (place + 1, share)]
            corners = [
                (at * len(sizes) + end, weight * part) for at, weight in corners for end, part in ends if part
            ]
        for at, weight in corners:
            total += weight * self._logs[at]
        return factor * math.exp(total)


def _between(sizes: Sequence[float], size: float) -> tuple[int, float | None]:
    """The place of the size before, and how far on the way to the next; None past the last."""
    if size <= sizes[0]:
        return 0, 0.0
    if size > sizes[-1]:
        return len(sizes) - 1, None
    place = min(bisect_right(sizes, size) - 1, len(sizes) - 2)
    return place, math.log(size / sizes[place]) / math.log(sizes[place + 1] / sizes[place])
