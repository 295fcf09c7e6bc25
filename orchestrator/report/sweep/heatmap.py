"""The objective over two settings as a heat map, for the picture and the page.

The two settings are those with the largest effect: the part of the objective's variance that a
setting alone explains, corrected for its number of values. Without the correction a setting drawn
at random would explain everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.sweep.space import point_key
from orchestrator.record.events.decoding import finite
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.draw.marks import (
    CARD,
    MUTED,
    Box,
    Color,
    Group,
    Hatch,
    Mark,
    Plot,
    Text,
    Tick,
    area,
    series_color,
)
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep import facts
from orchestrator.report.sweep.facts import SHORT_STATUS

MAX_LEVELS = 8
"""A setting with more numbers than this is divided into bins."""
NUM_BINS = 6
MAX_WORDS = 12
LOG_RATIO = 8.0
"""Positive numbers whose largest is at least this many times the smallest get a logarithmic scale."""
CELL_PX = 42
MIN_CELL_PX = 64
BEST = series_color(1)
WORST_SHARE = 0.04
BEST_SHARE = 0.5
"""Share of the colour in the best cell: the text on it stays readable, light and dark."""
MAX_NAME_CHARS = 24
_WORST_FIRST = ("out_of_memory", "failed", "infeasible", "stopped")


@dataclass(frozen=True)
class Levels:
    """The values of a setting in order, and the place of each value."""

    labels: tuple[str, ...]
    places: Mapping[str, int]

    def place(self, value: Any) -> int:
        return self.places[_key(value)]


def heat_map(record: SweepRecord) -> Plot | None:
    """Return the heat map; None if nothing was swept or measured. A cell has its best trial over the settings
    that the map does not show; without a completed trial it says why."""
    names = facts.swept_settings(record)
    if not names or not record.ranked():
        return None
    chosen = sorted(names, key=lambda name: -setting_effect(record, name))[:2]
    levels = {name: setting_levels([row.point.get(name) for row in record.rows]) for name in chosen}
    # The setting with more values goes along the longer side.
    shown = sorted(chosen, key=lambda name: -len(levels[name].labels))
    x, y = shown if len(shown) == 2 else (shown[0], "")
    columns = levels[x].labels
    rows = levels[y].labels if y else ("",)
    title = f"{facts.objective_name(record).capitalize()} by {' and '.join(map(facts.name_text, shown))}"
    others = [facts.name_text(name) for name in names if name not in chosen]

    def place(row: TrialRow) -> tuple[int, int]:
        return (levels[y].place(row.point.get(y)) if y else 0, levels[x].place(row.point.get(x)))

    return Plot(
        title,
        tuple(_cells(record, {row.trial: place(row) for row in record.rows}, (len(rows), len(columns)))),
        title,
        unit=facts.one_line(f"best over {', '.join(others)}", 66) if others else "",
        x_label=facts.name_text(x),
        y_label=facts.name_text(y) if y else "",
        x_ticks=_centred(columns),
        y_ticks=tuple((1 - middle, text) for middle, text in _centred(rows)),
        height=CELL_PX * len(rows),
        min_width=MIN_CELL_PX * len(columns),
    )


def _centred(texts: Sequence[str]) -> tuple[Tick, ...]:
    """Return a tick in the middle of each column."""
    return tuple(
        ((place + 0.5) / len(texts), facts.one_line(text, MAX_NAME_CHARS)) for place, text in enumerate(texts)
    )


def _cells(record: SweepRecord, places: Mapping[int, tuple[int, int]], shape: tuple[int, int]) -> list[Mark]:
    """Return each cell with its best trial, else with the worst end of its trials."""
    best: dict[tuple[int, int], TrialRow] = {}
    for row in record.ranked():
        best.setdefault(places[row.trial], row)
    scores = [row.score(record.objective) or 0.0 for row in best.values()]
    ends: dict[tuple[int, int], set[str]] = {}
    for row in record.rows:
        ends.setdefault(places[row.trial], set()).add(row.status)
    height, width = shape
    marks: list[Mark] = []
    for y in range(height):
        for x in range(width):
            box = (x / width, 1 - (y + 1) / height, (x + 1) / width, 1 - y / height)
            row = best.get((y, x))
            if row is not None:
                marks.append(_measured_cell(record, row, (min(scores), max(scores)), box))
            else:
                found = ends.get((y, x), ())
                marks += _empty_cell(next((end for end in _WORST_FIRST if end in found), ""), box)
    return marks


def _measured_cell(record: SweepRecord, row: TrialRow, span: tuple[float, float], box: Box) -> Group:
    """Return a cell, stronger with a better result; that of the best trial has a frame."""
    worst, best = span
    score = row.score(record.objective) or 0.0
    strength = relative_place(score, worst, best, is_log(worst, best)) if best > worst else 1.0
    ground = area(box, Color("c0", WORST_SHARE + (BEST_SHARE - WORST_SHARE) * strength), CARD, 2.0)
    text = facts.objective_text(record, facts.objective_value(record, row) or 0.0)
    left, lower, right, upper = box
    label = Text(((left + right) / 2, (lower + upper) / 2), text, room=right - left)
    # The cell with the frame stays a little apart from its neighbours.
    inset_x, inset_y = (0.03 * (right - left), 0.06 * (upper - lower))
    frame = area((left + inset_x, lower + inset_y, right - inset_x, upper - inset_y), None, BEST, 2.5)
    return Group((ground, *((frame,) if strength == 1 else ()), label), f"trial {row.trial}")


def _empty_cell(end: str, box: Box) -> list[Mark]:
    """Return a cell without a result; hatched if trials of it ended in another way."""
    left, lower, right, upper = box
    if not end:
        return [area(box, Color("c0", 0.0), CARD, 2.0)]
    label = Text(((left + right) / 2, (lower + upper) / 2), SHORT_STATUS[end], room=right - left, color=MUTED)
    return [Hatch(box), area(box, None, CARD, 2.0), label]


def setting_effect(record: SweepRecord, name: str) -> float:
    """Return the part of the objective's variance that a setting explains, from 0 to 1."""
    rows = record.ranked()
    if len(rows) < 2:
        return 0.0
    levels = setting_levels([row.point.get(name) for row in rows])
    scores = [row.score(record.objective) or 0.0 for row in rows]
    # Speeds span orders of magnitude. Scores by loss are negative and stay as they are.
    outcomes = [math.log(score) if score > 0 else score for score in scores]
    return explained_variance(outcomes, [levels.place(row.point.get(name)) for row in rows])


def explained_variance(values: Sequence[float], groups: Sequence[int]) -> float:
    """Return the part of the values' variance that their groups explain, corrected for the number
    of groups."""
    import pandas as pd

    frame: Frame = pd.DataFrame({"value": values, "group": groups})
    num_groups = frame["group"].nunique()
    total = float(((frame["value"] - frame["value"].mean()) ** 2).sum())
    if num_groups < 2 or total <= 0:
        return 0.0
    num_free = len(frame) - num_groups
    if num_free == 0:
        return 1.0
    means = frame.groupby("group")["value"].transform("mean")
    within = float(((frame["value"] - means) ** 2).sum())
    return max(0.0, 1 - (within / num_free) / (total / (len(frame) - 1)))


def setting_levels(values: Sequence[Any]) -> Levels:
    """Return the levels of a setting: numbers by size, in bins if there are many, then words.

    Words keep their order of appearance; those past a limit share the level 'others'.
    """
    distinct = {_key(value): value for value in values}
    numbers = sorted((value for value in distinct.values() if is_number(value)), key=float)
    if len(numbers) > MAX_LEVELS:
        places, labels = _bins(numbers)
    else:
        places = {_key(value): place for place, value in enumerate(numbers)}
        labels = [facts.short_value(value) for value in numbers]
    for value in distinct.values():
        if not is_number(value):
            places[_key(value)] = min(len(labels), MAX_WORDS)
            labels.append(facts.short_value(value))
    if len(labels) > MAX_WORDS:
        labels = [*labels[:MAX_WORDS], "others"]
    return Levels(tuple(labels), places)


def _bins(numbers: Sequence[Any]) -> tuple[dict[str, int], list[str]]:
    """Return the bin of each of the sorted numbers and the bins' labels; empty bins are left out."""
    low = float(numbers[0])
    high = float(numbers[-1])
    log = is_log(low, high)
    bins = [
        min(NUM_BINS - 1, int(relative_place(float(number), low, high, log) * NUM_BINS)) for number in numbers
    ]
    edges = [
        low * (high / low) ** (edge / NUM_BINS) if log else low + (high - low) * edge / NUM_BINS
        for edge in range(NUM_BINS + 1)
    ]
    used = sorted(set(bins))
    places = {_key(number): used.index(one) for number, one in zip(numbers, bins, strict=True)}
    return places, [f"{edges[one]:.2g} – {edges[one + 1]:.2g}" for one in used]


def is_log(low: float, high: float) -> bool:
    """Return whether numbers between two get a logarithmic scale."""
    return low > 0 and high / low >= LOG_RATIO


def relative_place(number: float, low: float, high: float, log: bool) -> float:
    """Return the place of a number between two, from 0 to 1."""
    return math.log(number / low) / math.log(high / low) if log else (number - low) / (high - low)


def is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and finite(value) is not None


def _key(value: Any) -> str:
    return point_key({"": value})
