"""Axes for image files and the page: bounds, scale and round labels for any values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.types import count_text

LOG_RATIO = 50
"""Positive values whose largest is more than this many times the smallest get a logarithmic axis."""
LOG_RANGE = 1e5
"""Ratio of the ends of a logarithmic axis: a loss that is 1e-12 once must not flatten the rest."""

MIN_BARS = 5
"""An axis of bars is at least this many bars wide, so that a single bar does not fill the frame."""


@dataclass(frozen=True)
class Axis:
    """Bounds of an axis, its scale, and the places of its labels."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    @property
    def labels(self) -> list[str]:
        """A text per tick: short, or exact if two short ones would be equal."""
        short = [tick_text(mark) for mark in self.ticks]
        return short if len(set(short)) == len(short) else [f"{mark:.10g}" for mark in self.ticks]

    def place(self, value: float) -> float:
        """Return the place of a value from 0 to 1, never outside the frame."""
        low = self._scaled(self.low)
        high = self._scaled(self.high)
        return min(1.0, max(0.0, (self._scaled(value) - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def value_axis(values: Iterable[float], from_zero: bool = False, top: float | None = None) -> Axis:
    """Return the y axis of some values, with a margin above and below.

    ``top`` is the upper end of the axis if no value exceeds it.
    """
    values = list(values) or [0.0, 1.0]
    low = min(values)
    high = max(values)
    if low > 0 and not from_zero and high / low > LOG_RATIO:
        return log_axis(values)
    if from_zero:
        low = min(0.0, low)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    high = top if top is not None and high <= top else high + margin
    low = low if from_zero and low == 0 else low - margin
    return Axis(low, high, False, ticks(low, high, 6))


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis of positive values, with a margin above and below."""
    low = max(min(values), max(values) / LOG_RANGE) / 1.2
    high = max(values) * 1.2
    return Axis(low, high, True, _log_ticks(low, high))


def step_axis(values: Iterable[float], bars: bool = False, max_labels: int = 7) -> Axis:
    """Return the x axis of steps or epochs: labels at whole numbers, and a margin around a single value."""
    values = list(values) or [0.0, 1.0]
    low = min(values)
    high = max(values)
    marks = _whole_numbers(ticks(low, high, max_labels)) or (low,)
    if bars:
        middle = (low + high) / 2
        reach = max((high - low) / 2 + 0.6, MIN_BARS / 2)
        return Axis(middle - reach, middle + reach, False, marks)
    return Axis(low, high, False, marks) if high > low else Axis(low - 1, high + 1, False, (low,))


def time_axis(values: Iterable[float]) -> Axis:
    """Return the x axis of times since the start. The name of the axis stands in place of its zero."""
    high = max(values, default=0.0) or 1.0
    return Axis(0.0, high, False, ticks(0.0, high, 7)[1:])


def ticks(low: float, high: float, max_count: int) -> tuple[float, ...]:
    """Return round numbers within the bounds, at most ``max_count``."""
    if not high - low > 1e-200:
        return (low,)
    power = 10.0 ** math.floor(math.log10((high - low) / max_count))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        if last - first < max_count:
            return tuple(index * step for index in range(first, last + 1))
    return (low,)


def tick_text(value: float) -> str:
    """Return a number with at most four digits, short enough for an axis."""
    if abs(value) >= 10_000:
        return count_text(value).replace(".0", "")
    if value and abs(value) < 1e-3:
        mantissa, power = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten, with 2 and 5 between them if the range is narrow."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return tuple(mark for mark in marks if low <= mark <= high)


def _whole_numbers(marks: Sequence[float]) -> tuple[float, ...]:
    return tuple(mark for mark in marks if mark == int(mark))
