"""Bars, curves and shades of characters, with a plain form for outputs that cannot encode them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

FULL = "█"
EMPTY = "░"
MARK = "│"
LEVELS = "▁▂▃▄▅▆▇█"
SHADES = "·░▒▓█"
ELLIPSIS = "…"
_PLAIN = str.maketrans("█░│▁▂▃▄▅▆▇▒▓·×–→…★", "#-|._-~=+*=%.x->.*")


def plain(text: str) -> str:
    """Return the text with a character of ASCII for each of these; the width stays."""
    return text.translate(_PLAIN)


def bar(share: float, width: int) -> str:
    """Return a bar whose part ``share``, 0 to 1, is full."""
    full = round(min(1.0, max(0.0, share)) * width)
    return FULL * full + EMPTY * (width - full)


def curve(values: Sequence[float]) -> str:
    """Return one character for each value, from the lowest to the highest; ratios count if all are
    positive, since losses fall fast at first."""
    if min(values, default=0.0) > 0:
        values = [log(value) for value in values]
    low = min(values, default=0.0)
    span = max(values, default=0.0) - low
    if not span:
        return LEVELS[0] * len(values)
    return "".join(LEVELS[min(7, int(8 * (value - low) / span))] for value in values)
