"""A comparison of runs on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrator.cli.tables import make_table
from orchestrator.report.comparison.compare import Comparison
from orchestrator.report.comparison.differences import Difference


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print results, differences, losses and verdicts; the page has the curves."""
    for note in comparison.notes:
        console.print(Text(note))
    console.print(_results_table(comparison))
    _print_differences(console, "settings that differ", comparison.settings, comparison.labels)
    _print_differences(
        console, "hardware and software that differ", comparison.environment, comparison.labels
    )
    for agreement in comparison.losses:
        console.print(Text(f"losses of {agreement.reference} and {agreement.label} {agreement.text}"))
    if comparison.verdicts:
        table = make_table("figure", "verdict", "because", title="verdicts")
        for verdict in comparison.verdicts:
            table.add_row(Text(verdict.figure), verdict.outcome, Text(verdict.text))
        console.print(table)


def _results_table(comparison: Comparison) -> Table:
    """Return the results, a column for each run; the best of a row is bold."""
    title = f"results (validation: {comparison.judged_at})"
    table = make_table("", *map(escape, comparison.labels), title=title)
    table.add_row("status", *(run.record.status for run in comparison.runs))
    for figure in comparison.figures:
        cells = [
            Text(text, style="bold" if value is not None and value == figure.best else "")
            for text, value in zip(figure.texts, figure.values, strict=True)
        ]
        table.add_row(Text(figure.name), *cells)
    return table


def _print_differences(
    console: Console, title: str, differences: Sequence[Difference], labels: Sequence[str]
) -> None:
    if not differences:
        console.print(Text(f"{title}: none"))
        return
    table = make_table("", *map(escape, labels), title=title)
    for difference in differences:
        table.add_row(Text(difference.name), *map(Text, difference.texts))
    console.print(table)
