"""A comparison of runs on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from orchestrator.cli.tables import cell, make_table
from orchestrator.report.comparison.compare import Comparison
from orchestrator.report.comparison.differences import Difference


def print_comparison(comparison: Comparison) -> None:
    """Print results, differences, losses and verdicts; the page has the curves."""
    console = Console()
    if comparison.headline:
        console.print(cell(comparison.headline, "bold"))
    for note in comparison.notes:
        console.print(cell(note))
    console.print(_results_table(comparison))
    _print_differences(console, "settings that differ", comparison.settings, comparison.labels)
    _print_differences(
        console, "hardware and software that differ", comparison.environment, comparison.labels
    )
    for agreement in comparison.losses:
        console.print(cell(f"losses of {agreement.reference} and {agreement.label} {agreement.text}"))
    if comparison.verdicts:
        table = make_table("figure", "verdict", "because", title="verdicts")
        for verdict in comparison.verdicts:
            table.add_row(cell(verdict.figure), cell(verdict.outcome), cell(verdict.text))
        console.print(table)


def _results_table(comparison: Comparison) -> Table:
    """Return the results, a column for each run; the best of a row is bold."""
    title = f"results (validation: {comparison.judged_at})"
    table = make_table("", *comparison.labels, title=title)
    table.add_row("status", *(cell(run.record.status) for run in comparison.runs))
    if comparison.identities:
        table.add_row("identity", *map(cell, comparison.identities))
    for figure in comparison.figures:
        cells = [
            cell(text, "bold" if value is not None and value == figure.best else "")
            for text, value in zip(figure.texts, figure.values, strict=True)
        ]
        table.add_row(cell(figure.name), *cells)
    return table


def _print_differences(
    console: Console, title: str, differences: Sequence[Difference], labels: Sequence[str]
) -> None:
    if not differences:
        console.print(cell(f"{title}: none"))
        return
    table = make_table("", *labels, title=title)
    for difference in differences:
        table.add_row(cell(difference.name), *map(cell, difference.texts))
    console.print(table)
