"""Values every floor speaks in. No torch, no Ray, nothing that costs time to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
JSON = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None

VERSION = "0.1.0"
KIB, MIB, GIB = 1024, 1024**2, 1024**3


@dataclass(frozen=True)
class Rejected:
    """An option that was weighed and not taken."""

    option: str
    why: str


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value with its reason, and what was weighed against it."""

    value: T
    reason: str
    rejected: tuple[Rejected, ...] = ()


def bytes_text(count: float) -> str:
    """A size for people: 1536 -> '1.5 KiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """A number for people: 124439808 -> '124.4M'."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:g}"


def seconds_text(seconds: float) -> str:
    """A duration for people: 75 -> '1m 15s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
