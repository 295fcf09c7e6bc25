"""Tables, lines and JSON on the screen, in the one style of all verbs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrator.types import printable

_FILE_COLUMNS = 150


def cell(text: str, style: str = "") -> Text:
    """Return a text of a run's files as it is: neither markup nor control characters take effect."""
    return Text(printable(text), style)


def print_line(text: str) -> None:
    """Print a text as it is; a terminal breaks it, not we: paths stay whole for copying."""
    Console().print(Text(text), soft_wrap=True)


def print_json(content: Any) -> None:
    """Print JSON for machines; values that JSON does not have become texts."""
    Console().print_json(json.dumps(content, default=str))


def wide_console() -> Console:
    """Return the console of tables with many columns: as wide as the terminal, or wide enough for a file."""
    return Console() if Console().is_terminal else Console(width=_FILE_COLUMNS)


def make_table(*columns: str, title: str) -> Table:
    """Return an empty table; long cells wrap."""
    table = Table(
        title=escape(printable(title)), title_justify="left", header_style="bold", border_style="dim"
    )
    for column in columns:
        table.add_column(cell(column), overflow="fold")
    return table
