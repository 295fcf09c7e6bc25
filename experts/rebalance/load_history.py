"""The recent loads of a layer's experts, and how long such loads will last.

Loads are tokens per step. They are counted over windows of some steps. Newer windows weigh more than older
ones; a long mean remembers loads that come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any

MAX_WINDOWS = 8
_DECAY = 0.8  # the weight of a window relative to the one after it
_LONG_HALF_LIFE = 200  # steps
_LARGE_SHIFT = 0.1  # share of the tokens: loads that differ by so much need other hosts

Loads = tuple[float, ...]
"""Tokens per step of each expert, in the order of the gate's rows."""


@dataclass(frozen=True)
class LoadWindow:
    """The tokens of each expert in some steps, summed over all ranks."""

    counts: tuple[int, ...]
    steps: int

    @property
    def loads(self) -> Loads:
        return tuple(count / self.steps for count in self.counts)


@dataclass(frozen=True)
class LoadHistory:
    """The loads of the experts of one layer, in the order of ``ids``."""

    ids: tuple[int, ...] = ()
    windows: tuple[LoadWindow, ...] = ()
    """The newest is last."""
    long_mean: Loads = ()

    def observed(self, ids: Sequence[int], counts: Sequence[int], steps: int) -> LoadHistory:
        """Add a window. With other experts than before the history begins anew."""
        if len(ids) != len(counts) or steps < 1:
            raise ValueError(
                f"a window has {len(counts)} counts of {steps} steps for {len(ids)} experts; it needs "
                f"a count for each expert, and at least one step"
            )
        window = LoadWindow(tuple(counts), steps)
        if tuple(ids) != self.ids:
            return LoadHistory(tuple(ids), (window,), window.loads)
        kept = 0.5 ** (steps / _LONG_HALF_LIFE)
        pairs = zip(self.long_mean, window.loads, strict=True)
        long_mean = tuple(kept * old + (1 - kept) * new for old, new in pairs)
        return LoadHistory(self.ids, (*self.windows, window)[-MAX_WINDOWS:], long_mean)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the windows, which sum to 1."""
        raw = [_DECAY**age for age in reversed(range(len(self.windows)))]
        return tuple(weight / sum(raw) for weight in raw)

    @property
    def mean(self) -> Loads:
        """The exponential mean of the windows."""
        columns = zip(*(window.loads for window in self.windows), strict=True)
        return tuple(sum(map(mul, column, self.weights)) for column in columns)

    def farthest(self) -> LoadWindow | None:
        """Return the window that differs most from the newest; None where all are alike."""
        newest = self.windows[-1]
        farthest = max(self.windows, key=lambda window: distance(window, newest))
        return farthest if distance(farthest, newest) > 0 else None

    def expected_steps(self, most: float) -> float:
        """Return how long the loads will last at the rate at which they changed.

        Compares the newer half of the windows with the older half. Loads that alternate faster than
        that are the same in both, and count as lasting."""
        half = len(self.windows) // 2
        older = _joined(self.windows[:half])
        newer = _joined(self.windows[-half:])
        shift = distance(older, newer)
        return min(most, newer.steps * _LARGE_SHIFT / shift) if shift else most

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LoadHistory:
        windows = [LoadWindow(tuple(window["counts"]), window["steps"]) for window in fields["windows"]]
        return cls(tuple(fields["ids"]), tuple(windows), tuple(fields["long_mean"]))


def distance(first: LoadWindow, second: LoadWindow) -> float:
    """Return the share of the tokens that went to other experts, beyond what chance explains.

    It is 0 for equal loads, and nearly 1 for loads without a common expert."""
    totals = (sum(first.counts), sum(second.counts))
    if not all(totals):
        return 0.0
    difference = noise = 0.0
    for a, b in zip(first.counts, second.counts, strict=True):
        difference += abs(a / totals[0] - b / totals[1]) / 2
        share = (a + b) / sum(totals)
        # The mean deviation of two independent counts.
        noise += math.sqrt(share * (1 / totals[0] + 1 / totals[1]) * 2 / math.pi) / 2
    return max(0.0, difference - 2 * noise)


def _joined(windows: Sequence[LoadWindow]) -> LoadWindow:
    columns = zip(*(window.counts for window in windows), strict=True)
    counts = tuple(sum(column) for column in columns)
    return LoadWindow(counts, sum(window.steps for window in windows))
