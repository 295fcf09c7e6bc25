"""``orchestrator report``: draw the report of a run or a sweep again, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.flags import read_options


@dataclass(frozen=True)
class ReportOptions:
    """Draw plots, performance_summary.txt and report.html again from a run folder."""

    folder: Path
    """The folder of a run or of a sweep, or the address of a run (s3://bucket/run1)."""


def run(argv: Sequence[str]) -> int:
    options = read_options(ReportOptions, argv, "orchestrator report", positional="folder")
    return show_report(options.folder)


def show_report(folder: Path) -> int:
    """Draw the report, and print the path of each file."""
    from rich.console import Console
    from rich.text import Text

    from orchestrator.record.ledger import holds_sweep
    from orchestrator.record.remote_record import local_record
    from orchestrator.report.run.page import draw_report
    from orchestrator.report.sweep.page import draw_sweep
    from orchestrator.storage.address import as_url, location_text
    from orchestrator.storage.folder import open_folder

    with local_record(folder) as local:
        draw = draw_sweep if holds_sweep(local) else draw_report
        for path in draw(local):
            shown = str(path)
            if as_url(folder):
                open_folder("the run folder", folder).upload(path, path.name)
                shown = f"{location_text(folder)}/{path.name}"
            Console().print(Text(f"wrote {shown}"), soft_wrap=True)
    return 0
