"""``scaling.md``: the scaling tables of a sweep for people, with the commands that train with the
best settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep import facts
from orchestrator.report.sweep.facts import STATUS_WORDS
from orchestrator.report.sweep.frames import scaling_frame
from orchestrator.report.sweep.scaling import best_by_devices
from orchestrator.report.sweep.scaling_text import UNKNOWN, against_text, scaling_texts
from orchestrator.types import printable

STAR = "★"
MAX_SERIES = 12
"""Series of a kind that are shown; scaling.csv has all of them."""
MAX_REASONS = 50
_MARKUP = re.compile(r"([\\`*_\[\]<>|#~&$])")
_SECTIONS = {
    "strong": ("Strong scaling", "The global batch stays; with more devices each gets less of it."),
    "weak": ("Weak scaling", "Each device keeps its batch; the global batch grows with the devices."),
}


def scaling_md(record: SweepRecord) -> str:
    """Return the Markdown page."""
    frame = scaling_frame(record)
    parts = [f"# Scaling: {escaped(facts.title(record))}", escaped(facts.sentence(record), 2000)]
    parts += _best_section(record, frame[frame["scaling"] == "best"])
    for kind, (name, explanation) in _SECTIONS.items():
        parts += _series_section(record, name, explanation, frame[frame["scaling"] == kind])
    return "\n\n".join([*parts, *_other_trials(record)]) + "\n"


def _best_section(record: SweepRecord, points: Frame) -> list[str]:
    best = best_by_devices(record)
    if not best:
        return ["No trial completed with a result, so there is nothing to compare."]
    parts = ["## Best setting of each number of devices"]
    parts += (
        [f"The best trial is {escaped(facts.edge_text(record), 2000)}."] if facts.edge_text(record) else []
    )
    if len(points) > 1:
        parts.append(f"Speed-up and efficiency against {against_text(points)}.")
    if len(points):
        parts.append(markdown_table(scaling_texts(record, points)))
    is_python = facts.is_python_task(record)
    for devices, row in best.items():
        parts.append(f"{STAR} {devices} {'device' if devices == 1 else 'devices'} (trial {row.trial}):")
        parts.append(_code(facts.train_command(record, row), "python" if is_python else "sh"))
    if not is_python:
        parts += [
            "Or the best trial that fits the devices you have:",
            _code(facts.tuned_command(record), "sh"),
        ]
    return parts


def _series_section(record: SweepRecord, name: str, explanation: str, points: Frame) -> list[str]:
    if not len(points):
        return []
    numbers = points["series"].unique()
    shown = points[points["series"].isin(numbers[:MAX_SERIES])]
    texts = scaling_texts(record, shown)
    # The label stands in the first row of its series only.
    texts.insert(0, "series", shown["label"].mask(shown["series"].duplicated(), ""))
    texts["best"] = shown["best_of_its_devices"].map({True: STAR, False: ""})
    parts = [
        f"## {name}",
        f"{explanation} Speed-up and efficiency against {against_text(points)}. "
        f"{STAR} marks the best setting of its number of devices.",
        markdown_table(texts),
    ]
    if len(numbers) > MAX_SERIES:
        parts.append(f"{len(numbers) - MAX_SERIES} slower series are in scaling.csv.")
    return parts


def _other_trials(record: SweepRecord) -> list[str]:
    """Return the section of trials that did not complete, with their reasons."""
    import pandas as pd

    rows = [row for row in record.rows if row.status != "completed"]
    if not rows:
        return []
    cells = [
        {
            "trial": str(row.trial),
            "status": STATUS_WORDS[row.status],
            **{facts.name_text(name): facts.setting_text(row, name) for name in facts.setting_names(record)},
            "reason": row.reason or UNKNOWN,
        }
        for row in rows[:MAX_REASONS]
    ]
    parts = ["## Trials that did not complete", markdown_table(pd.DataFrame(cells))]
    if len(rows) > MAX_REASONS:
        parts.append(f"{len(rows) - MAX_REASONS} more are in sweep.csv.")
    return parts


def markdown_table(frame: Frame) -> str:
    """Return a frame of texts as a Markdown table: columns of one width, figures to the right."""
    columns = [_aligned([name, *frame[name]]) for name in frame.columns]
    lines = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aligned(texts: Sequence[str]) -> list[str]:
    """Return a column padded to one width: its name, the ruler, its cells."""
    cells = [escaped(text) for text in texts]
    is_right = all(_is_figure(cell) for cell in cells[1:])
    width = max(3, *(cell_len(cell) for cell in cells))
    ruler = "-" * (width - 1) + ":" if is_right else "-" * width
    name, *body = [_padded(cell, width, is_right) for cell in cells]
    return [name, ruler, *body]


def _padded(cell: str, width: int, is_right: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if is_right else cell + space


def _is_figure(cell: str) -> bool:
    return not cell or cell == UNKNOWN or cell[0].isdigit()


def escaped(text: str, max_chars: int = 300) -> str:
    """Return text that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", facts.one_line(text, max_chars))


def _code(command: str, language: str) -> str:
    """Return a code block that nothing in the command can close."""
    clean = printable(command)
    longest = max((len(run) for run in re.findall(r"`+", clean)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{clean}\n{fence}"
