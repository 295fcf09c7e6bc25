"""Throughput of timed steps with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

_MAX_BLOCKS = 16
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class TimedBlock:
    """Consecutive steps that were timed together."""

    seconds: float
    steps: int
    samples: int


def rate_of(blocks: Sequence[TimedBlock]) -> tuple[float, float]:
    """Return samples per second, and half the width of their confidence interval as a share of
    them.

    The rate is a ratio of two sums, because the last step of an epoch may have fewer samples. Of
    many blocks, neighbours are joined: a disturbance lasts longer than one block, and an interval
    from correlated blocks would be too narrow.
    """
    while len(blocks) > _MAX_BLOCKS:
        blocks = [_joined(blocks[first : first + 2]) for first in range(0, len(blocks), 2)]
    seconds = sum(block.seconds for block in blocks)
    samples = sum(block.samples for block in blocks)
    number = len(blocks)
    rate = samples / seconds
    if number < 2:
        return rate, math.inf
    variance = sum((block.samples - rate * block.seconds) ** 2 for block in blocks) / (number - 1)
    quantile = float(stdtrit(number - 1, (1 + _CONFIDENCE) / 2))  # of Student's t
    return rate, quantile * math.sqrt(variance / number) / (seconds / number) / rate


def _joined(blocks: Sequence[TimedBlock]) -> TimedBlock:
    return TimedBlock(
        seconds=sum(block.seconds for block in blocks),
        steps=sum(block.steps for block in blocks),
        samples=sum(block.samples for block in blocks),
    )
