"""Tables on the screen, in the one style of all verbs."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrator.types import printable


def cell(text: str, style: str = "") -> Text:
    """Return a text of a run's files as it is: neither markup nor control characters take effect."""
    return Text(printable(text), style)


def make_table(*columns: str, title: str) -> Table:
    """Return an empty table; long cells wrap."""
    table = Table(
        title=escape(printable(title)), title_justify="left", header_style="bold", border_style="dim"
    )
    for column in columns:
        table.add_column(cell(column), overflow="fold")
    return table
