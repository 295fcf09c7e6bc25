"""Helpers of the sections: a switch that the plan may decide, and checks of numbers and paths."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from orchestrator.storage.address import check_address

Switch = Literal["auto", "on", "off"]

LARGEST_NUMBER = 2**63
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096 - 256
"""Limits of file systems; the difference is for the files below a folder."""


def at_least(name: str, value: float | None, least: float) -> None:
    """Raise ValueError unless the value is a finite number of at least ``least``, or None."""
    if value is None:
        return
    if LARGEST_NUMBER <= value < math.inf:
        raise ValueError(
            f"{name} is larger than 2**63; it must be at least {least}, and a number that machines can "
            "count to"
        )
    if not least <= value < math.inf:
        finite = "" if math.isfinite(value) else " and finite"
        raise ValueError(f"{name} is {value}; it must be at least {least}{finite}")


def within(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless the value lies between two numbers, ends included."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")


def positive(name: str, value: float | None) -> None:
    """Raise ValueError unless the value is a positive finite number, or None."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be positive and finite")


def possible_path(name: str, value: str | Path | None) -> None:
    """Raise ValueError for a path or address that nothing accepts, before a run tries to open it."""
    check_address(name, value)
    text = str(value or "")
    if any(character < " " or character == "\x7f" for character in text):
        raise ValueError(f"{name} is {reprlib.repr(text)}; a path without control characters was needed")
    longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    if longest > MAX_NAME_BYTES or len(os.fsencode(text)) > MAX_PATH_BYTES:
        raise ValueError(
            f"{name} is {reprlib.repr(text)}, with a name of {longest} bytes; "
            f"at most {MAX_NAME_BYTES} are possible"
        )


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as a flag takes them: '0,2'."""
    return ",".join(str(number) for number in numbers)
