"""Trend and noise of a loss: how far it fell lately, and how sure that is. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from orchestrator.report.run.figures.panels import Points

CONFIDENCE = 0.975
"""One-sided, of the margin of a trend."""
MIN_POINTS = 5
"""Points of a trend: with fewer its margin says nothing."""
NUM_WINDOWS = 20
"""Means of a training loss, whose single steps are too noisy to judge."""
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_SECOND_DIFFERENCE = 1.5**0.5  # deviation of x[i] - (x[i-1] + x[i+1]) / 2, in deviations of x
_FALL_SHARE = 0.01


@dataclass(frozen=True)
class Trend:
    """The fall of a loss over the later half of its points, by a straight line through them."""

    num_points: int
    first: float
    """The step at which that half begins."""
    end: float
    """The last loss."""
    fall: float
    """The fall as a part of the loss at the beginning of that half; negative if it rose."""
    margin: float
    """Half the confidence interval of the fall: chance alone stays within it."""


def trend(points: Points, beginning: float) -> Trend | None:
    """Return the trend of the later half of the points; None if they are too few.

    ``beginning`` is the loss before anything was learnt. A loss that is almost zero is compared with a
    part of the whole fall: from 1e-4 to 1e-5 nothing is learnt any more."""
    later = points[-max(MIN_POINTS, math.ceil(len(points) / 2)) :]
    if len(later) < MIN_POINTS:
        return None
    from scipy.special import stdtrit

    slope, first, slope_error = _line(later)
    end = later[-1][1]
    span = later[-1][0] - later[0][0]
    scale = max(abs(first), _FALL_SHARE * abs(beginning - end)) or 1.0
    margin = float(stdtrit(len(later) - 2, CONFIDENCE)) * slope_error * span
    return Trend(len(later), later[0][0], end, -slope * span / scale, margin / scale)


def _line(points: Points) -> tuple[float, float, float]:
    """Return slope, first value and standard error of the slope of the least-squares line."""
    middle = fmean(x for x, _ in points)
    mean = fmean(y for _, y in points)
    squares = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - mean) for x, y in points) / squares
    residuals = [y - mean - slope * (x - middle) for x, y in points]
    variance = sum(residual**2 for residual in residuals) / (len(points) - 2)
    return slope, mean + slope * (points[0][0] - middle), math.sqrt(variance / squares)


def window_means(points: Points) -> Points:
    """Return the means of equal parts of a series, each at its last step."""
    num_windows = min(NUM_WINDOWS, len(points))
    edges = [index * len(points) // num_windows for index in range(num_windows + 1)] if points else []
    windows = [points[start:end] for start, end in pairwise(edges)]
    return [(window[-1][0], fmean(y for _, y in window)) for window in windows]


def noise(scores: Sequence[float]) -> float:
    """Return the standard deviation of chance, from each value's distance to the mean of its neighbours.

    A trend hardly adds to it, nor does the steep beginning of a run."""
    triples = zip(scores, scores[1:], scores[2:], strict=False)
    distances = [abs(middle - (before + after) / 2) for before, middle, after in triples]
    return _MAD_TO_DEVIATION * median(distances) / _SECOND_DIFFERENCE if distances else 0.0
