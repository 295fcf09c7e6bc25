"""What sections have in common: a switch that may be left to the plan, and checks of numbers."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Switch = Literal["auto", "on", "off"]

LONGEST_NAME, LONGEST_PATH = 255, 4096 - 256  # bytes that file systems take; files below it need some of them


LARGEST = 2**63


def at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and LARGEST <= value < math.inf:
        raise ValueError(
            f"{name} is larger than 2**63; it must be at least {least}, and a number that machines can count to"
        )
    if value is not None and not least <= value < math.inf:
        raise ValueError(
            f"{name} is {value}; it must be at least {least}"
            + ("" if math.isfinite(value) else " and finite")
        )


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")


def positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be positive and finite")


def possible_path(name: str, value: str | Path | None) -> None:
    """Refuse what can be the path of nothing: told here, and not by whoever opens it first."""
    text = str(value or "")
    if any(character < " " or character == "\x7f" for character in text):
        raise ValueError(f"{name} is {reprlib.repr(text)}; a path without control characters was needed")
    longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(text)) > LONGEST_PATH:
        raise ValueError(
            f"{name} is {reprlib.repr(text)}, with a name of {longest} bytes; at most {LONGEST_NAME} are possible"
        )


def listed(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)
