"""``orchestrator watch``: a view of a running or finished run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.reading.flags import read_options
from orchestrator.errors import UserError


@dataclass(frozen=True)
class WatchOptions:
    """Show progress, speed, hosts, experts and events of a run, until it ends."""

    folder: Path
    """The folder of a run, or its address (s3://bucket/run1)."""
    once: bool = False
    """Show one frame and end."""
    interval: float = 1.0
    """Seconds between looks at the folder."""


def run(argv: Sequence[str]) -> int:
    options = read_options(WatchOptions, argv, "orchestrator watch", positional="folder")
    if not 0.1 <= options.interval <= 3600:
        raise UserError(f"--interval is {options.interval:g}; a number from 0.1 to 3600 was needed")
    return show_run(options)


def show_run(options: WatchOptions) -> int:
    from rich.console import Console

    from orchestrator.live.watch.watching import Watch, show_once, show_until_end, wait_for_run

    console = Console(highlight=False)
    if options.once:
        show_once(Watch(options.folder, console), console)
        return 0
    # The interrupt is the usual way to leave: the run goes on.
    with suppress(KeyboardInterrupt):
        wait_for_run(options.folder, console, options.interval)
        show_until_end(Watch(options.folder, console), console, options.interval)
    return 0
