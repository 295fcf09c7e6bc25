"""Tables on the screen, in the one style of all verbs."""

from __future__ import annotations

from rich.table import Table


def make_table(*columns: str, title: str) -> Table:
    """Return an empty table; long cells wrap."""
    table = Table(title=title, title_justify="left", header_style="bold", border_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
