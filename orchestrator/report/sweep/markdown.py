"""``scaling.md``: the scaling tables of a sweep for people, with the command that trains with the best settings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.run.read import finite
from orchestrator.report.sweep.csv_files import Group, best_group, groups
from orchestrator.report.sweep.facts import (
    PHASES,
    WORDS,
    hours_text,
    in_python,
    in_words,
    one_line,
    other_swept,
    point_text,
    rate_text,
    sentence,
    setting_names,
    title,
    train_command,
    tuned_command,
    value_text,
)
from orchestrator.report.sweep.scaling import (
    Scaled,
    best_by_devices,
    devices_of,
    phase_shares,
    predicted_hours,
    settings_of,
)
from orchestrator.types import bytes_text

STAR = "★"
MOST_SERIES = 12
"""Series of a kind that are shown; all of them are in scaling.csv."""
MOST_REASONS = 50
_MARKUP = re.compile(r"([\\`*_\[\]<>|#~&$])")
_EXPLAINED = {
    "strong": ("Strong scaling", "The global batch stays; each device gets less of it as there are more."),
    "weak": ("Weak scaling", "Each device keeps its batch; the global batch grows with them."),
}

Cells = Sequence[str]


def scaling_md(record: SweepRecord) -> str:
    """The page of Markdown."""
    parts = [f"# Scaling: {escaped(title(record))}", escaped(sentence(record), 2000), *_best(record)]
    found = groups(record)
    for kind, (name, about) in _EXPLAINED.items():
        parts += _section(record, name, about, [group for group in found if group.kind == kind])
    return "\n\n".join([*parts, *_others(record)]) + "\n"


def scaling_names(record: SweepRecord) -> list[str]:
    """The columns of a scaling table."""
    first = [
        "devices",
        "strategy",
        "precision",
        "batch",
        "accumulation",
        "global batch",
        *map(in_words, other_swept(record)),
    ]
    loss = ["validation loss"] if _has_loss(record) else []
    return [
        *first,
        *loss,
        "samples/s",
        "speed-up",
        "efficiency",
        "memory",
        f"{' / '.join(PHASES)}, %",
        "whole run",
        "trial",
    ]


def scaling_cells(record: SweepRecord, group: Group, point: Scaled) -> list[str]:
    """A row of it, as text."""
    row, ran = point.row, settings_of(point.row)
    names = (
        "strategy",
        "precision",
        "batch_size",
        "accumulation_steps",
        "global_batch_size",
        *other_swept(record),
    )
    loss = [loss_text(row)] if _has_loss(record) else []
    return [
        str(point.devices),
        *(value_text(ran[name]) if name in ran else "–" for name in names),
        *loss,
        rate_text(row),
        f"{point.speedup:.2f}×" if point.devices != group.points[0].devices else "1×",
        efficiency_text(point),
        memory_text(row),
        phases_text(row),
        hours_text(predicted_hours(record, row)),
        str(row.trial),
    ]


def efficiency_text(point: Scaled) -> str:
    return f"{100 * point.efficiency:.0f}%" + (
        f" ± {100 * point.uncertainty:.1f}" if point.uncertainty is not None else ""
    )


def memory_text(row: TrialRow) -> str:
    peak = finite(row.peak_memory_bytes)
    return bytes_text(peak) if peak else "–"


def phases_text(row: TrialRow) -> str:
    """Percent of a step in the order of the phases: '3 / 30 / 44 / 8 / 12'."""
    shares = phase_shares(row)
    return (
        " / ".join(f"{100 * shares[name]:.0f}" if name in shares else "–" for name in PHASES)
        if shares
        else "–"
    )


def against_text(found: Sequence[Group]) -> str:
    """What speed-up and efficiency are measured against."""
    bases = {group.points[0].devices for group in found}
    if bases == {1}:
        return "one device"
    return (
        f"{bases.pop()} devices, the fewest there are"
        if len(bases) == 1
        else "the fewest devices of each series"
    )


def _best(record: SweepRecord) -> list[str]:
    best = best_by_devices(record)
    if not best:
        return ["No trial was completed with a result, so there is nothing to compare."]
    group = best_group(record)
    told = [f"Speed-up and efficiency against {against_text([group])}."] if len(group.points) > 1 else []
    table = (
        [_table(scaling_names(record), [scaling_cells(record, group, point) for point in group.points])]
        if group.points
        else []
    )
    parts = ["## Best setting of each number of devices", *told, *table]
    for devices, row in best.items():
        language = "python" if in_python(record) else "sh"
        parts += [f"{STAR} {devices} {'device' if devices == 1 else 'devices'} (trial {row.trial}):"]
        parts += [_code(train_command(record, row), language)]
    if in_python(record):
        return parts
    return [*parts, "Or the best of them all that fits the devices at hand:", _code(tuned_command(record))]


def _section(record: SweepRecord, name: str, about: str, found: Sequence[Group]) -> list[str]:
    if not found:
        return []
    best = {row.trial for row in best_by_devices(record).values()}
    rows = [
        [
            group.label if place == 0 else "",
            *scaling_cells(record, group, point),
            STAR if point.row.trial in best else "",
        ]
        for group in found[:MOST_SERIES]
        for place, point in enumerate(group.points)
    ]
    table = _table(["series", *scaling_names(record), "best"], rows)
    cut = (
        [f"{len(found) - MOST_SERIES} slower series are in scaling.csv."] if len(found) > MOST_SERIES else []
    )
    marked = f" {STAR} marks the best setting of its number of devices."
    return [
        f"## {name}",
        f"{about} Speed-up and efficiency against {against_text(found)}.{marked}",
        table,
        *cut,
    ]


def _others(record: SweepRecord) -> list[str]:
    """Trials that did not complete, and why."""
    names, rows = setting_names(record), [row for row in record.rows if row.status != "completed"]
    if not rows:
        return []
    lines = [
        [str(row.trial), WORDS[row.status], *(point_text(row, name) for name in names), row.reason or "–"]
        for row in rows
    ]
    table = _table(["trial", "status", *map(in_words, names), "reason"], lines[:MOST_REASONS])
    cut = [f"{len(rows) - MOST_REASONS} more are in sweep.csv."] if len(rows) > MOST_REASONS else []
    return ["## Trials that did not complete", table, *cut]


def _has_loss(record: SweepRecord) -> bool:
    return any(finite(row.validation_loss) is not None for row in record.rows if devices_of(row) is not None)


def loss_text(row: TrialRow) -> str:
    loss = finite(row.validation_loss)
    return "–" if loss is None else f"{loss:.4g}"


def _table(names: Cells, rows: Iterable[Cells]) -> str:
    """Columns of one width, figures to the right."""
    lines = [[escaped(cell) for cell in line] for line in [names, *rows]]
    right = [all(_is_figure(line[place]) for line in lines[1:]) for place in range(len(names))]
    widths = [max(3, *(_width(line[place]) for line in lines)) for place in range(len(names))]
    ruler = [
        f"{'-' * (width - 1)}:" if figure else "-" * width
        for width, figure in zip(widths, right, strict=True)
    ]
    aligned = [[_padded(*cell) for cell in zip(line, widths, right, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [aligned[0], ruler, *aligned[1:]])


def _padded(cell: str, width: int, right: bool) -> str:
    room = " " * (width - _width(cell))
    return room + cell if right else cell + room


def _is_figure(cell: str) -> bool:
    return not cell or cell == "–" or cell[0].isdigit()


def _width(text: str) -> int:
    """Columns on a screen: wide characters take two, marks above letters none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def escaped(text: str, most: int = 300) -> str:
    """Text that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", one_line(text, most))


def _code(command: str, language: str = "sh") -> str:
    """A block that nothing in it can close."""
    clean = "".join(character if character.isprintable() else " " for character in command)
    longest = max((len(run) for run in re.findall(r"`+", clean)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{clean}\n{fence}"
