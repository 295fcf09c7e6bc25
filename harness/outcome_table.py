"""Print a file of outcomes as a Markdown table: a row for each file of tests, then what failed and why.

python -m harness.outcome_table FILE"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import markdown_table
from harness.outcomes import Outcome, Outcomes, read_outcomes, source_hash

_COLUMNS = ("tests", "passed", "failed", "skipped", "not run", "seconds")


def outcome_table(outcomes: Outcomes, source: str) -> str:
    """Return the tables. An outcome with another source counts as not run."""
    present = {test: outcome for test, outcome in outcomes.latest.items() if outcome.source == source}
    by_file: dict[str, list[str]] = {}
    for test in outcomes.collected:
        by_file.setdefault(_file(test), []).append(test)
    rows = [_row(f"`{file}`", tests, present) for file, tests in sorted(by_file.items())]
    rows.append(_row("all", outcomes.collected, present))
    machines = "\n".join(f"{machine}." for machine in outcomes.machines)
    parts = [
        f"# What was tested on a GPU\n\n{machines}\n",
        markdown_table(_COLUMNS, rows),
        _failures(present),
        _skips(present),
        _other_source(outcomes, present),
    ]
    return "\n".join(part for part in parts if part)


def _row(name: str, tests: Sequence[str], present: dict[str, Outcome]) -> tuple[object, ...]:
    ended = [present[test] for test in tests if test in present]
    counts = Counter(outcome.outcome for outcome in ended)
    seconds = sum(outcome.seconds for outcome in ended)
    not_run = len(tests) - len(ended)
    return name, counts["passed"], counts["failed"], counts["skipped"], not_run, f"{seconds:.0f}"


def _failures(present: dict[str, Outcome]) -> str:
    failed = [outcome for outcome in present.values() if outcome.outcome == "failed"]
    return _list("Failed", [f"`{outcome.test}`: {_error_line(outcome.message)}" for outcome in failed])


def _skips(present: dict[str, Outcome]) -> str:
    skipped = [outcome for outcome in present.values() if outcome.outcome == "skipped"]
    reasons = Counter(outcome.message.removeprefix("Skipped: ") for outcome in skipped)
    return _list("Skipped", [f"{reason}: {number}" for reason, number in reasons.most_common()])


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {line}" for line in lines), ""]) if lines else ""


def _other_source(outcomes: Outcomes, present: dict[str, Outcome]) -> str:
    older = [outcome for test, outcome in outcomes.latest.items() if test not in present]
    if not older:
        return ""
    counts = Counter(outcome.outcome for outcome in older)
    figures = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    return f"Of those not run, the last outcomes with other source: {figures}.\n"


def _file(test: str) -> str:
    return test.split("::")[0]


def _error_line(message: str) -> str:
    """Return the error's own text: pytest marks its lines by an E, and puts the place after them."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return (errors or lines or ["no message"])[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print a file of outcomes as a Markdown table.")
    parser.add_argument("file", type=Path, help="written by pytest -p harness.outcomes --outcomes FILE")
    options = parser.parse_args(arguments)
    if not options.file.exists():
        parser.error(f"{options.file} does not exist; pytest -p harness.outcomes writes it")
    sys.stdout.write(outcome_table(read_outcomes(options.file), source_hash()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
