"""Output to a terminal or a log that can neither end nor garble a run.

Text from outside (messages, paths, names of metrics) is shown as it is: never as markup, never as
control characters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from orchestrator.types import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MAX_LINE_CHARS = 300  # of a message on the screen; the files of the run have the whole message

_logger = logging.getLogger("orchestrator")


class Display:
    """A console that switches itself off when it fails. ``quiet`` shows nothing at all.

    ``close`` is called when the display fails; ``advice`` completes the warning about it.
    """

    def __init__(self, console: Console | None, quiet: bool, close: Callable[[], None], advice: str) -> None:
        from rich.console import Console

        self.console = console or Console()
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.quiet = quiet
        self._close = close
        self._advice = advice

    @property
    def encoding(self) -> str:
        return self.console.encoding

    def guard(self, show: Callable[[], None]) -> None:
        """Call ``show`` unless quiet. A closed terminal or a fault of the display ends the display only."""
        if self.quiet:
            return
        try:
            show()
        except (Exception, SystemExit) as error:  # rich exits on a broken pipe
            self.quiet = True
            with suppress(Exception, SystemExit):
                self._close()
            _logger.warning("the display stopped (%s: %s); %s", type(error).__name__, error, self._advice)

    def line(self, text: str, style: str = "") -> None:
        """Show a line. In a file it is not wrapped, so that it can be searched."""
        self.guard(lambda: self.console.print(self.text(text, style), soft_wrap=not self.is_live))

    def text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        return Text(printable_line(text, self.encoding), style=style)


def printable_line(text: str, encoding: str) -> str:
    """Return one printable line: no line breaks, no escape sequences, no characters the output
    cannot encode."""
    line = printable(text).rstrip()
    short = line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 4] + " ..."
    return short.encode(encoding, "replace").decode(encoding)
