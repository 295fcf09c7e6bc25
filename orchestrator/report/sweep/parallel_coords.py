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
from orchestrator.report.draw.marks import LINE, Color, Group, Key, Path, Plot, Step, Text, Tick, line
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep import facts
from orchestrator.report.sweep.heatmap import (
    BEST,
    MAX_NAME_CHARS,
    is_log,
    is_number,
    relative_place,
    setting_effect,
)

MAX_SETTINGS = 8
MAX_LINES = 400
MAX_MARKS = 10
MIN_DISTANCE = 0.052
"""Marks closer than this part of an axis would touch each other."""
SPREAD = 0.03
"""Largest distance to which lines through one value are spread, so that their number can be seen."""
MIN_SCALE_PX = 90
LEFT_AXIS = 0.08
"""Place of the first axis: its marks are to the left of it."""
RIGHT_AXIS = 0.96


@dataclass(frozen=True)
class Scale:
    """An axis: its name, its marks, and the place of each line's value, from 0 at its lower end to 1."""

    name: str
    marks: tuple[Tick, ...]
    places: tuple[float, ...]


def parallel_plot(record: SweepRecord) -> Plot | None:
    """Return the plot; None with fewer than two trials to compare, or if no setting differs. Lines go from
    the worst trial to the best, which is on top."""
    rows = record.ranked()[:MAX_LINES][::-1]
    names = facts.swept_settings(record)
    if len(rows) < 2 or not names:
        return None
    by_effect = sorted(names, key=lambda name: -setting_effect(record, name))
    shown = [name for name in names if name in by_effect[:MAX_SETTINGS]]
    scales = [_scale(facts.name_text(name), [row.point.get(name) for row in rows]) for name in shown]
    outcome = numeric_scale(
        facts.objective_name(record), [facts.objective_value(record, row) or 0.0 for row in rows]
    )
    best_is_low = record.criterion.mode == "min"
    places_by_line = zip(*(_spread_apart(scale.places) for scale in scales), outcome.places, strict=True)
    scales.append(outcome)
    xs = [LEFT_AXIS + (RIGHT_AXIS - LEFT_AXIS) * index / (len(scales) - 1) for index in range(len(scales))]
    curves = []
    for row, places, value in zip(rows, places_by_line, outcome.places, strict=True):
        strength = 1 - value if best_is_low else value
        points = list(zip(xs, map(_y, places), strict=True))
        curve = _curve(points, strength, is_best=row is rows[-1])
        curves.append(Group((curve,), _line_text(record, row, names)))
    axes = [line((x, _y(-SPREAD)), (x, _y(1 + SPREAD)), stroke=LINE, width=1.5) for x in xs]
    labels = [
        Text((x - 0.006, _y(place)), facts.one_line(text, 20), "right", Color("soft"), is_tag=True)
        for x, scale in zip(xs, scales, strict=True)
        for place, text in scale.marks
    ]
    direction = "lower" if best_is_low else "higher"
    return Plot(
        "Settings and outcome",
        (*axes, *curves, *labels),
        f"{len(rows)} trials over {', '.join(scale.name for scale in scales)}",
        unit=f"a line for each trial, stronger with {direction} {outcome.name}",
        keys=(Key("best", BEST),),
        x_ticks=tuple(
            (x, facts.one_line(scale.name, MAX_NAME_CHARS)) for x, scale in zip(xs, scales, strict=True)
        ),
        height=330,
        min_width=MIN_SCALE_PX * len(scales),
    )


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
    marks = [(places[key], facts.short_value(distinct[key])) for key in ordered]
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


def _readable(marks: Sequence[Tick]) -> tuple[Tick, ...]:
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


def _y(place: float) -> float:
    """Return a place within the plot, although lines through the ends of an axis are spread apart too."""
    return (place + SPREAD) / (1 + 2 * SPREAD)


def _line_text(record: SweepRecord, row: TrialRow, names: Sequence[str]) -> str:
    outcome = facts.objective_text(record, facts.objective_value(record, row) or 0.0)
    settings = ", ".join(f"{facts.name_text(name)} {facts.setting_text(row, name)}" for name in names)
    return f"trial {row.trial}: {settings}: {outcome} {facts.objective_name(record)}"


def _curve(points: Sequence[tuple[float, float]], strength: float, is_best: bool) -> Path:
    """Return a curve that crosses each axis horizontally, so that lines through one value stay apart."""
    steps: list[Step] = [("M", (points[0],))]
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = 0.42 * (x1 - x0)
        steps.append(("C", ((x0 + bend, y0), (x1 - bend, y1), (x1, y1))))
    if is_best:
        return Path(tuple(steps), BEST, width=3.2)
    return Path(tuple(steps), Color("c0", 0.15 + 0.85 * strength, "line"), width=1.4)
