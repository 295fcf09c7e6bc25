"""Parallel coordinates: an axis per swept setting and one for the objective, a line per completed trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.config.sweep.space import point_key
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.draw.axes import tick_text, ticks
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep.facts import (
    name_text,
    objective_name,
    objective_value,
    short_value,
    swept_settings,
)
from orchestrator.report.sweep.heatmap import is_log, is_number, relative_place, setting_effect

MAX_SETTINGS = 8
MAX_LINES = 400
MAX_MARKS = 10
MIN_DISTANCE = 0.052
"""Marks closer than this part of an axis would touch each other."""
SPREAD = 0.03
"""Largest distance to which lines through one value are spread, so that their number can be seen."""

Mark = tuple[float, str]
"""A place on an axis, from 0 at its lower end to 1 at its upper, and the text there."""


@dataclass(frozen=True)
class Scale:
    """An axis: its name, its marks, and the place of each line's value."""

    name: str
    marks: tuple[Mark, ...]
    places: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """A trial: its place on each axis."""

    row: TrialRow
    places: tuple[float, ...]
    strength: float
    """From 0, the worst trial, to 1, the best."""


@dataclass(frozen=True)
class ParallelPlot:
    """Lines from the worst to the best; the last scale is that of the objective."""

    scales: tuple[Scale, ...]
    lines: tuple[Line, ...]
    best_is_low: bool


def parallel_plot(record: SweepRecord) -> ParallelPlot | None:
    """Return the plot; None with fewer than two trials to compare, or if no setting differs."""
    rows = record.ranked()[:MAX_LINES][::-1]
    names = swept_settings(record)
    if len(rows) < 2 or not names:
        return None
    by_effect = sorted(names, key=lambda name: -setting_effect(record, name))
    shown = [name for name in names if name in by_effect[:MAX_SETTINGS]]
    scales = [_scale(name_text(name), [row.point.get(name) for row in rows]) for name in shown]
    outcome = numeric_scale(objective_name(record), [objective_value(record, row) or 0.0 for row in rows])
    best_is_low = record.criterion.mode == "min"
    strengths = [1 - place if best_is_low else place for place in outcome.places]
    places_by_scale = [*(_spread_apart(scale.places) for scale in scales), outcome.places]
    places_by_line = zip(*places_by_scale, strict=True)
    lines = [
        Line(row, places, strength)
        for row, places, strength in zip(rows, places_by_line, strengths, strict=True)
    ]
    return ParallelPlot((*scales, outcome), tuple(lines), best_is_low)


def _scale(name: str, values: Sequence[Any]) -> Scale:
    return numeric_scale(name, values) if all(map(is_number, values)) else word_scale(name, values)


def word_scale(name: str, values: Sequence[Any]) -> Scale:
    """Return a scale of words, or of words and numbers: one place for each value, numbers first."""
    distinct = {point_key({"": value}): value for value in values}

    def order(key: str) -> tuple[int, float, str]:
        value = distinct[key]
        return (0, float(value), "") if is_number(value) else (1, 0.0, key)

    ordered = sorted(distinct, key=order)
    places = {key: (place + 0.5) / len(ordered) for place, key in enumerate(ordered)}
    marks = [(places[key], short_value(distinct[key])) for key in ordered]
    return Scale(name, _readable(marks), tuple(places[point_key({"": value})] for value in values))


def numeric_scale(name: str, values: Sequence[float]) -> Scale:
    """Return a scale of numbers, marked at the values if they are few, else at round numbers."""
    low = min(values)
    high = max(values)
    if not high > low:
        return Scale(name, ((0.5, tick_text(low)),), (0.5,) * len(values))
    log = is_log(low, high)
    distinct = sorted(set(values))
    marked = distinct if len(distinct) <= MAX_MARKS else _round_marks(low, high, log)
    marks = [(relative_place(value, low, high, log), tick_text(value)) for value in marked]
    places = tuple(relative_place(value, low, high, log) for value in values)
    return Scale(name, _readable(marks), places)


def _round_marks(low: float, high: float, log: bool) -> list[float]:
    if not log:
        return list(ticks(low, high, 7))
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [mark for mark in marks if low <= mark <= high]


def _readable(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Return the marks at both ends, and those between that touch no other."""
    if len(marks) < 2:
        return tuple(marks)
    end = marks[-1]
    readable = [marks[0]]
    for mark in marks[1:-1]:
        if mark[0] - readable[-1][0] >= MIN_DISTANCE and end[0] - mark[0] >= MIN_DISTANCE:
            readable.append(mark)
    return (*(mark for mark in readable if end[0] - mark[0] >= MIN_DISTANCE), end)


def _spread_apart(places: Sequence[float]) -> tuple[float, ...]:
    """Return places with lines through the same value next to each other, the best on top.

    The lines come from the worst to the best.
    """
    import pandas as pd

    distinct = sorted(set(places))
    gap = min((after - before for before, after in pairwise(distinct)), default=1.0)
    reach = min(SPREAD, 0.35 * gap)
    column: Frame = pd.Series(places, dtype="float64")
    same = column.groupby(column)
    count = same.transform("size")
    # From -reach for the first line through a value to +reach for the last.
    offset = reach * (2 * same.cumcount() / (count - 1) - 1)
    return tuple(column.where(count == 1, column + offset).tolist())
