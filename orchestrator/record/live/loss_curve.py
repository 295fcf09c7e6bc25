"""The losses of a whole run in constant memory."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

MAX_POINTS = 1024


class LossCurve:
    """Losses over steps. When there are too many points, every other one goes, and half as many are kept
    from then on."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._num_added = 0

    def add(self, step: int, loss: float | None) -> None:
        self._num_added += 1
        if loss is None or not isfinite(loss) or self._num_added % self._stride:
            return
        self._points.append((step, loss))
        if len(self._points) > MAX_POINTS:
            self._points = self._points[1::2]
            self._stride *= 2

    def cut(self, step: int) -> None:
        """Forget the steps past a step: they are repeated."""
        while self._points and self._points[-1][0] > step:
            self._points.pop()

    def means(self, num_parts: int) -> list[float]:
        """Return the means over equal parts of the points, at most ``num_parts``."""
        losses = [loss for _, loss in self._points]
        num_parts = min(num_parts, len(losses))
        cuts = [index * len(losses) // num_parts for index in range(num_parts + 1)] if num_parts else [0]
        parts = [losses[begin:end] for begin, end in pairwise(cuts)]
        return [sum(part) / len(part) for part in parts]
