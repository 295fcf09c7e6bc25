"""Parallel coordinates: an axis for each swept setting and one for the objective, a line for each completed trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.config.space import point_key
from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.draw.axes import tick_text, ticks
from orchestrator.report.sweep.facts import in_words, objective_name, objective_value, swept, value_text
from orchestrator.report.sweep.heatmap import LOG_FROM, effect, is_number, part_of
from orchestrator.report.sweep.scaling import ranked

MOST_SETTINGS = 8
MOST_LINES = 400
MOST_MARKS = 10
NEAR = 0.052
"""Marks nearer than this part of an axis would touch one another."""
SPREAD = 0.03
"""How far lines through one value are drawn apart, so that one sees how many there are."""


@dataclass(frozen=True)
class Scale:
    """An axis: its name, what is written where (0 is its lower end, 1 its upper), and the place of each line's value."""

    name: str
    marks: tuple[tuple[float, str], ...]
    places: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    row: TrialRow
    places: tuple[float, ...]
    strength: float
    """From 0, the worst trial, to 1, the best."""


@dataclass(frozen=True)
class Parallel:
    """Lines from the worst to the best; the scale of the objective is the last."""

    scales: tuple[Scale, ...]
    lines: tuple[Line, ...]
    best_low: bool


def parallel(record: SweepRecord) -> Parallel | None:
    """None where there are fewer than two trials to compare, or nothing differs between them."""
    rows, names = ranked(record)[:MOST_LINES][::-1], swept(record)
    if len(rows) < 2 or not names:
        return None
    chosen = set(sorted(names, key=lambda name: -effect(record, name))[:MOST_SETTINGS])
    outcome = numeric_scale(objective_name(record), [objective_value(record, row) or 0.0 for row in rows])
    low = record.objective == "validation_loss"
    strengths = [1 - place if low else place for place in outcome.places]
    scales = [
        _scale(in_words(name), [row.point.get(name) for row in rows]) for name in names if name in chosen
    ]
    parts = [*(_apart(scale.places) for scale in scales), outcome.places]
    lines = [
        Line(row, places, strength)
        for row, places, strength in zip(rows, zip(*parts, strict=True), strengths, strict=True)
    ]
    return Parallel((*scales, outcome), tuple(lines), low)


def _scale(name: str, values: Sequence[Any]) -> Scale:
    return numeric_scale(name, values) if all(map(is_number, values)) else word_scale(name, values)


def word_scale(name: str, values: Sequence[Any]) -> Scale:
    """Words and numbers together: one place for each, numbers first."""
    distinct = {point_key({"": value}): value for value in values}
    ordered = sorted(
        distinct, key=lambda key: (0, float(distinct[key]), "") if is_number(distinct[key]) else (1, 0.0, key)
    )
    places = {key: (place + 0.5) / len(ordered) for place, key in enumerate(ordered)}
    marks = [(places[key], value_text(distinct[key])) for key in ordered]
    return Scale(name, _readable(marks), tuple(places[point_key({"": value})] for value in values))


def numeric_scale(name: str, values: Sequence[float]) -> Scale:
    """Marked at its values where they are few, else at round numbers."""
    low, high = min(values), max(values)
    log = low > 0 and high / low >= LOG_FROM
    if not high > low:
        return Scale(name, ((0.5, tick_text(low)),), (0.5,) * len(values))

    distinct = sorted(set(values))
    marked = distinct if len(distinct) <= MOST_MARKS else _round_marks(low, high, log)
    marks = [(part_of(value, low, high, log), tick_text(value)) for value in marked]
    return Scale(name, _readable(marks), tuple(part_of(value, low, high, log) for value in values))


def _round_marks(low: float, high: float, log: bool) -> list[float]:
    if not log:
        return list(ticks(low, high, 7))
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [mark for mark in marks if low <= mark <= high]


def _readable(marks: Sequence[tuple[float, str]]) -> tuple[tuple[float, str], ...]:
    """The marks at both ends, and between them those that touch no other."""
    kept = list(marks[:1])
    for place, text in marks[1:-1]:
        if place - kept[-1][0] >= NEAR and marks[-1][0] - place >= NEAR:
            kept.append((place, text))
    if len(marks) > 1:
        kept = [*(mark for mark in kept if marks[-1][0] - mark[0] >= NEAR), marks[-1]]
    return tuple(kept)


def _apart(places: Sequence[float]) -> tuple[float, ...]:
    """Places of lines that come from the worst to the best: those through the same value side by side, the best on top."""
    distinct = sorted(set(places))
    gap = min((b - a for a, b in pairwise(distinct)), default=1.0)
    reach, seen, moved = min(SPREAD, 0.35 * gap), dict.fromkeys(distinct, 0), []
    for place in places:
        count = places.count(place)
        moved.append(place + reach * (2 * seen[place] / (count - 1) - 1) if count > 1 else place)
        seen[place] += 1
    return tuple(moved)
