"""Lines of a frame: a label, parts with their styles, and bars and curves of characters, with a plain form
for outputs that cannot encode them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

from orchestrator.types import printable

if TYPE_CHECKING:
    from rich.text import Text

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


LABEL_WIDTH = 16
_GAP = 3

Part = str | tuple[str, str]
"""A text, or a text and its style."""


def line(*parts: Part) -> Text:
    from rich.text import Text

    result = Text(no_wrap=True)
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        # Names and messages come from outside: control characters would garble the terminal.
        result.append(printable(text), style)
    return result


def label_line(label: str, *parts: Part) -> Text:
    return line((f"{label:<{LABEL_WIDTH}}"[:LABEL_WIDTH], "dim"), *parts)


def spread(left: tuple[str, str], right: tuple[str, str], width: int) -> Text:
    """Return a line with one text at its left end and one at its right end."""
    first = line(left)
    first.truncate(max(10, width - len(right[0]) - 2), overflow="ellipsis")
    first.append(" " * max(2, width - first.cell_len - len(right[0])))
    return first.append_text(line(right))


def side_by_side(left: list[Text], right: list[Text], width: int) -> list[Text]:
    """Return two columns of lines, half of the width each."""
    column = column_width(width)
    rows: list[Text] = []
    for index in range(max(len(left), len(right))):
        row = fitted(left[index], column) if index < len(left) else line("")
        if index < len(right):
            row.append(" " * (column + _GAP - row.cell_len))
            row.append_text(right[index])
        rows.append(row)
    return rows


def column_width(width: int) -> int:
    """Return the width of each of two columns."""
    return (width - _GAP) // 2


def fitted(text: Text, width: int) -> Text:
    """Return a copy of a line that is at most ``width`` wide."""
    copy = text.copy()
    copy.truncate(width, overflow="ellipsis")
    return copy
