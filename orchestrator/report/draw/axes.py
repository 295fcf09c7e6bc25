"""Axes for pictures and page alike: bounds, scale and round labels, whatever the values are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.types import count_text

LOG_FROM = 50
"""Positive values of which the largest is this many times the smallest go on a logarithmic axis."""
LOG_DEPTH = 1e5
"""How far down a logarithmic axis reaches: a loss that touches 1e-12 once shall not flatten the rest."""

MIN_BARS = 5


@dataclass(frozen=True)
class Axis:
    """Bounds of an axis, its scale, and where its labels stand."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    @property
    def labels(self) -> list[str]:
        """A text per tick, exact where the short form would say the same of two."""
        short = [tick_text(mark) for mark in self.ticks]
        return short if len(set(short)) == len(short) else [f"{mark:.10g}" for mark in self.ticks]

    def at(self, value: float) -> float:
        """Place of a value between 0 and 1, never beyond the frame."""
        low, high, here = (
            math.log10(max(v, self.low)) if self.log else v for v in (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (here - low) / (high - low)))


def value_axis(values: Iterable[float], from_zero: bool = False, top: float | None = None) -> Axis:
    """The y axis of some values, with room above and below; ``top`` is its upper end where that is known beforehand."""
    values = list(values) or [0.0, 1.0]
    low, high = min(values), max(values)
    if low > 0 and not from_zero and high / low > LOG_FROM:
        low, high = max(low, high / LOG_DEPTH) / 1.2, high * 1.2
        return Axis(low, high, True, _log_ticks(low, high))
    if from_zero:
        low = min(0.0, low)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    high = top if top is not None and high <= top else high + room
    low = low if from_zero and low == 0 else low - room
    return Axis(low, high, False, ticks(low, high, 6))


def step_axis(values: Iterable[float], bars: bool = False, labels: int = 7) -> Axis:
    """The x axis of steps or epochs: whole numbers, and room for one alone. A bar alone shall not fill the frame."""
    values = list(values) or [0.0, 1.0]
    low, high = min(values), max(values)
    marks = _whole(ticks(low, high, labels)) or (low,)
    if bars:
        reach = max((high - low) / 2 + 0.6, MIN_BARS / 2)
        return Axis((low + high) / 2 - reach, (low + high) / 2 + reach, False, marks)
    return Axis(low, high, False, marks) if high > low else Axis(low - 1, high + 1, False, (low,))


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Round numbers within the bounds, as many as there may be."""
    if not high - low > 1e-200:
        return (low,)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (factor * power for factor in (1, 2, 5, 10, 20)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return tuple(index * step for index in range(first, last + 1))
    return (low,)


def tick_text(value: float) -> str:
    """A number of four figures at most, short enough for an axis."""
    if abs(value) >= 10_000:
        return count_text(value).replace(".0", "")
    if value and abs(value) < 1e-3:
        mantissa, power = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten, with 2 and 5 between them where the range is narrow."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return tuple(mark for mark in marks if low <= mark <= high)


def _whole(marks: Sequence[float]) -> tuple[float, ...]:
    return tuple(mark for mark in marks if mark == int(mark))
