"""``orchestrator report``: draw the report of a run or a sweep again, or compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.reading.flags import read_options
from orchestrator.errors import UserError

COMPARISON = Path("results/comparison")


@dataclass(frozen=True)
class ReportOptions:
    """Draw plots, performance_summary.txt and report.html again from a run folder, or compare runs."""

    folders: tuple[Path, ...]
    """The folder of a run or of a sweep, or the address of a run (s3://bucket/run1). Several runs are
    compared: results, settings that differ, curves on common axes."""
    out: Path | None = None
    """The local folder for comparison.html and comparison.json; by default results/comparison."""


def run(argv: Sequence[str]) -> int:
    options = read_options(ReportOptions, argv, "orchestrator report", positional="folders")
    if not options.folders:
        raise UserError("--folders is empty; give the folder of a run, or of several runs to compare")
    first, *others = options.folders
    if others:
        return show_comparison(options.folders, options.out or COMPARISON)
    if options.out is not None:
        raise UserError("--out is the folder of a comparison; a single report is written into its own folder")
    return show_report(first)


def show_report(folder: Path) -> int:
    """Draw the report, and print the path of each file."""
    from orchestrator.cli.tables import print_line
    from orchestrator.record.files.ledger import holds_sweep
    from orchestrator.record.files.remote_record import local_record
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
            print_line(f"wrote {shown}")
    return 0


def show_comparison(folders: Sequence[Path], out: Path) -> int:
    """Compare runs: print the summary, and write page and data."""
    from orchestrator.cli.comparison_tables import print_comparison
    from orchestrator.cli.tables import print_line
    from orchestrator.record.files.remote_record import local_record
    from orchestrator.report.comparison.compare import compare
    from orchestrator.report.comparison.page import write_comparison
    from orchestrator.report.comparison.runs import read_runs
    from orchestrator.storage.address import as_url

    if as_url(out):
        raise UserError(f"--out {as_url(out)} is an address; a comparison is written into a local folder")
    with ExitStack() as stack:
        opened = [(folder, stack.enter_context(local_record(folder))) for folder in folders]
        comparison = compare(read_runs(opened))
        print_comparison(comparison)
        for path in write_comparison(comparison, out):
            print_line(f"wrote {path}")
    return 0
