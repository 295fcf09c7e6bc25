"""How much of the exchange passes beside other kernels on a GPU, from the times of kernels in a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

EXCHANGE = "nccl"
"""Part of the names of kernels that exchange."""


@dataclass(frozen=True)
class KernelTime:
    """A kernel of a trace, with its begin and end in ns."""

    name: str
    begin: int
    end: int

    @property
    def is_exchange(self) -> bool:
        return EXCHANGE in self.name.lower()


@dataclass(frozen=True)
class Overlap:
    """Times in ns: kernels of the exchange, all other kernels, and both at once."""

    exchange: int
    compute: int
    both: int

    @classmethod
    def of(cls, kernels: Sequence[KernelTime]) -> Overlap:
        exchange = _union((each.begin, each.end) for each in kernels if each.is_exchange)
        compute = _union((each.begin, each.end) for each in kernels if not each.is_exchange)
        everything = _union([*exchange, *compute])
        both = _length(exchange) + _length(compute) - _length(everything)
        return cls(_length(exchange), _length(compute), both)

    @property
    def hidden_share(self) -> float:
        """The part of the exchange that passes beside other kernels."""
        return self.both / self.exchange if self.exchange else 0.0

    @property
    def busy_share(self) -> float:
        """The part of the other kernels that run beside the exchange."""
        return self.both / self.compute if self.compute else 0.0


def kernels_of(profile: Any) -> list[KernelTime]:
    """Return the kernels of a finished profile of torch; copies and fills are none."""
    events = profile.profiler.kineto_results.events()
    on_device = [event for event in events if str(event.device_type()).endswith("CUDA")]
    return [
        KernelTime(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in on_device
        if not event.name().startswith(("Memcpy", "Memset"))
    ]


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that meet."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)
