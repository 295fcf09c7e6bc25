"""What sections have in common: a switch that may be left to the plan, and checks of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

Switch = Literal["auto", "on", "off"]


def at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be at least {least}" + ("" if math.isfinite(value) else " and finite"))


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")


def positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be positive and finite")


def listed(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)
