"""HTML of all pages: escaped text, and tables."""

from __future__ import annotations

import html
import re

# Control characters, and invisible ones that change the direction or the look of what follows.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def esc(text: object) -> str:
    """Return any text as HTML: neither markup, nor control characters, nor changes of direction."""
    return html.escape(_UNSAFE.sub("\ufffd", str(text)), quote=True)


def table(name: str, head: str, rows: str, classes: str = "") -> str:
    """Return a table from header cells and rows that are HTML already.

    ``name`` is what a screen reader says of it. The frame can be focused: the arrow keys scroll it.
    """
    attribute = f' class="{classes}"' if classes else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(name)}"><table{attribute}>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def header_cells(*names: str) -> str:
    return "".join(header_cell(name) for name in names)


def header_cell(name: str, is_figure: bool = False) -> str:
    """Return the header of a column; figures stand to the right."""
    attribute = ' class="figure"' if is_figure else ""
    return f'<th scope="col"{attribute}>{esc(name)}</th>'
