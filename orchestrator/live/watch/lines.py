"""Lines of a frame: a label, and parts with their styles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.types import printable

if TYPE_CHECKING:
    from rich.text import Text

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
