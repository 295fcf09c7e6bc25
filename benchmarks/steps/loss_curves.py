"""Differences between the losses of runs that should be equal within rounding.

Two runs of one command differ too, where a backward pass adds in no fixed order, and the difference grows
with the steps. So every pair of runs is compared, in windows of steps: a change of the code has kept the
losses if its runs differ from the others by no more than those differ among themselves.

    python -m benchmarks.steps.loss_curves --losses FILE FILE [FILE ...] [--out FILE]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from benchmarks.support import benchmark_parser, header, markdown_table, publish

WINDOW_STEPS = 25


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--losses", nargs="+", type=Path, required=True, help="files that whole_step --losses has written"
    )
    arguments = parser.parse_args()
    names = [file.stem for file in arguments.losses]
    if len(set(names)) < max(2, len(names)):
        parser.error(f"--losses has {', '.join(names)}; at least two files with different names were needed")
    curves = read_losses(arguments.losses)
    publish(header("Losses of runs", arguments) + differences_of_losses(curves), arguments.out)


def read_losses(files: Sequence[Path]) -> dict[str, list[float]]:
    """Return the losses of each file under its name."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def differences_of_losses(curves: Mapping[str, Sequence[float]]) -> str:
    """Return a table of the mean and the largest difference of each pair of runs, by windows of the steps
    that all of them have."""
    steps = min(len(losses) for losses in curves.values())
    windows = [range(first, min(first + WINDOW_STEPS, steps)) for first in range(0, steps, WINDOW_STEPS)]
    rows = [
        (one, other, *(_difference(curves[one], curves[other], window) for window in windows))
        for one, other in combinations(curves, 2)
    ]
    columns = ("run", "other run", *(f"{window[0] + 1}–{window[-1] + 1}" for window in windows))
    title = "\nDifferences of losses, mean (largest), by windows of steps:\n\n"
    means = [
        (name, *(f"{statistics.mean(losses[step] for step in window):.4f}" for window in windows))
        for name, losses in curves.items()
    ]
    means_table = markdown_table(("mean loss of", *columns[2:]), means)
    return title + markdown_table(columns, rows) + "\n" + means_table


def _difference(one: Sequence[float], other: Sequence[float], window: range) -> str:
    differences = [abs(one[step] - other[step]) for step in window]
    return f"{statistics.mean(differences):.4f} ({max(differences):.4f})"


if __name__ == "__main__":
    main()
