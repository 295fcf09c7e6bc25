"""Value types, constants and text formats shared by every package.

A leaf module: it imports neither torch nor Ray, so that it costs no time to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
PrecisionName = Literal["fp32", "bf16", "fp16", "fp8"]
BF16_PRECISIONS = ("bf16", "fp8")
"""The precisions whose passes compute in bf16: fp8 is that of the experts' products alone."""
JSON = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None

VERSION = "0.1.0"

KIB = 1024
MIB = 1024**2
GIB = 1024**3

NOT_USED = "not used: "

PHASES = ("data", "forward", "backward", "communication", "optimizer", "graph")
"""The phases of a training step that the clock can tell apart, in the order in which they run.

A step that a CUDA graph repeats has one phase besides its data."""

MEMORY_PARTS = (
    "parameters",
    "weight_copies",
    "gradients",
    "optimizer",
    "average",
    "gate",
    "buffers",
    "data",
    "activations",
)
"""The parts of a worker's memory. The estimate of a plan and the measurement of a run name them alike.

``gate`` has the weights, gradients and optimizer state of the gates. ``activations`` has the buffers of
kernels and collectives too: measured, it is the peak without the other parts."""


@dataclass(frozen=True)
class Rejected:
    """An option that was considered and not chosen."""

    option: str
    why: str


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A chosen value, the reason for it, and the options that were rejected."""

    value: T
    reason: str
    rejected: tuple[Rejected, ...] = ()

    @property
    def is_worth_a_row(self) -> bool:
        """Whether the choice has an effect in this run, or shows that a given setting has none."""
        return is_worth_a_row(self.reason)


def is_worth_a_row(reason: str) -> bool:
    """Return whether a table should show the choice with this reason, which says first if it is not used.

    A setting that was given and has no effect is worth a row."""
    return not reason.startswith(NOT_USED) or "instead of --" in reason


def memory_part_text(name: str) -> str:
    """Return the name of a part of the memory for people: 'weight_copies' -> 'weight copies'."""
    return name.replace("_", " ")


def bytes_text(count: float) -> str:
    """Return a size for people: 1536 -> '1.5 KiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """Return a number for people: 124439808 -> '124.4M'."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:g}"


def flops_text(count: float) -> str:
    """Return a number of floating-point operations for people: 4.85e14 -> '485.0 TFLOP'."""
    if abs(count) >= 1e15:
        return f"{count / 1e15:,.1f} PFLOP"
    text = count_text(count)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def counted(count: int, noun: str, many: str = "") -> str:
    """Return a number with its noun: '1 layer', '2,000 layers'. ``many`` is a plural without an s alone."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {many or f'{noun}s'}"


def seconds_text(seconds: float) -> str:
    """Return a duration for people: 75 -> '1m 15s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def speed_text(samples_per_second: float | None) -> str:
    """Return a throughput for people, without its unit: 1234.5 -> '1,234', None -> '–'."""
    if samples_per_second is None:
        return "–"
    if 100 <= samples_per_second < 1e12:
        return f"{samples_per_second:,.0f}"
    return f"{samples_per_second:.3g}"


def value_text(value: object) -> str:
    """Return the value of a setting for people: True -> 'on', None -> 'none', [1, 2] -> '1,2'."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(value_text, value))
    return str(value)


def printable(text: str) -> str:
    """Return a text as one line without control characters, which could command a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def first_line(message: object, max_chars: int | None = 200) -> str:
    """Return an error's first line, cut to ``max_chars``; the name of its class if it has no text."""
    lines = str(message).strip().splitlines()
    return lines[0][:max_chars] if lines else type(message).__name__


def flag_of(name: str) -> str:
    """Return the flag of a setting or an option: 'max_steps' -> '--max-steps'."""
    return f"--{name.replace('_', '-')}"
