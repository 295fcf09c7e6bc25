"""Throughput (or validation loss) over two settings, as a grid of cells: what the heat map in the picture and on the page shows.

The two settings are those that matter most. What matters is the part of the spread of the objective that a setting alone
explains, corrected for how many values it has: a setting that was drawn at random explains everything otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from orchestrator.config.space import point_key
from orchestrator.record.ledger import TrialRow, SweepRecord
from orchestrator.report.run.read import finite
from orchestrator.report.sweep.facts import SHORT, objective_text, objective_value, swept, value_text
from orchestrator.report.sweep.scaling import ranked, score_of

MOST_LEVELS = 8
"""Numbers of more values than this are put together in bins."""
BINS = 6
MOST_WORDS = 12
LOG_FROM = 8.0
"""Positive numbers of which the largest is this many times the smallest go by their logarithm."""
_WORST_FIRST = ("out_of_memory", "failed", "infeasible", "stopped")


@dataclass(frozen=True)
class Levels:
    """The values of a setting in their order, and the place of each."""

    labels: tuple[str, ...]
    places: Mapping[str, int]

    def of(self, value: Any) -> int:
        return self.places[_key(value)]


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None
    strength: float = 0.0
    """From 0, the worst cell, to 1, the best."""
    trial: int | None = None


@dataclass(frozen=True)
class HeatMap:
    """Cells by row and column. ``y`` is empty where one setting alone was swept."""

    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    others: tuple[str, ...]
    """Swept settings that the grid does not show: each cell has the best over them."""


def heat_map(record: SweepRecord) -> HeatMap | None:
    """None where nothing was swept or nothing was measured."""
    names = swept(record)
    if not names or not ranked(record):
        return None
    chosen = sorted(names, key=lambda name: -effect(record, name))[:2]
    levels = {name: levels_of([row.point.get(name) for row in record.rows]) for name in chosen}
    # The setting of more values lies along the longer side.
    x, *rest = sorted(chosen, key=lambda name: -len(levels[name].labels))
    y, others = (rest[0] if rest else ""), tuple(name for name in names if name not in chosen)
    lines = levels[y].labels if y else ("",)
    cells = _cells(record, (x, levels[x]), (y, levels[y]) if y else None)
    return HeatMap(x, y, levels[x].labels, lines, cells, others)


def effect(record: SweepRecord, name: str) -> float:
    """The part of the spread of the objective that a setting explains, from 0 to 1."""
    rows = ranked(record)
    if len(rows) < 2:
        return 0.0
    levels = levels_of([row.point.get(name) for row in rows])
    groups: dict[int, list[float]] = {}
    for row in rows:
        score = score_of(row, record.objective) or 0.0
        groups.setdefault(levels.of(row.point.get(name)), []).append(math.log(score) if score > 0 else score)
    return explained(list(groups.values()))


def explained(groups: Sequence[Sequence[float]]) -> float:
    values = [value for group in groups for value in group]
    mean, free = fmean(values), len(values) - len(groups)
    whole = sum((value - mean) ** 2 for value in values)
    within = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    if len(groups) < 2 or whole <= 0:
        return 0.0
    if free == 0:
        return 1.0
    return max(0.0, 1 - (within / free) / (whole / (len(values) - 1)))


def levels_of(values: Sequence[Any]) -> Levels:
    """Numbers by size, in bins where there are many; then words in the order they came, what is too many of them in one."""
    distinct = {_key(value): value for value in values}
    numbers = sorted((value for value in distinct.values() if is_number(value)), key=float)
    words = [value for value in distinct.values() if not is_number(value)]
    if len(numbers) > MOST_LEVELS:
        places, labels = _bins(numbers)
    else:
        places, labels = (
            {_key(value): place for place, value in enumerate(numbers)},
            [value_text(value) for value in numbers],
        )
    for value in words:
        places[_key(value)] = min(len(labels), MOST_WORDS)
        labels.append(value_text(value))
    return Levels(tuple(labels if len(labels) <= MOST_WORDS else [*labels[:MOST_WORDS], "others"]), places)


def _bins(numbers: Sequence[Any]) -> tuple[dict[str, int], list[str]]:
    """Even bins of sorted numbers, or even in the logarithm. Empty ones are left out."""
    low, high = float(numbers[0]), float(numbers[-1])
    log = low > 0 and high / low >= LOG_FROM
    raw = [part_of(float(number), low, high, log) for number in numbers]
    used = sorted({min(BINS - 1, int(part * BINS)) for part in raw})
    edges = [
        low * (high / low) ** (edge / BINS) if log else low + (high - low) * edge / BINS
        for edge in range(BINS + 1)
    ]
    places = {
        _key(number): used.index(min(BINS - 1, int(part * BINS)))
        for number, part in zip(numbers, raw, strict=True)
    }
    return places, [f"{edges[place]:.2g} – {edges[place + 1]:.2g}" for place in used]


def part_of(number: float, low: float, high: float, log: bool) -> float:
    """Place of a number between two, from 0 to 1."""
    return math.log(number / low) / math.log(high / low) if log else (number - low) / (high - low)


def _cells(
    record: SweepRecord, x: tuple[str, Levels], y: tuple[str, Levels] | None
) -> tuple[tuple[Cell, ...], ...]:
    height = len(y[1].labels) if y else 1
    held: list[list[list[TrialRow]]] = [[[] for _ in x[1].labels] for _ in range(height)]
    for row in record.rows:
        held[y[1].of(row.point.get(y[0])) if y else 0][x[1].of(row.point.get(x[0]))].append(row)
    bests = [
        max((score_of(row, record.objective) or -math.inf for row in rows), default=-math.inf)
        for line in held
        for rows in line
    ]
    scores = [score for score in bests if score > -math.inf]
    return tuple(tuple(_cell(record, rows, min(scores), max(scores)) for rows in line) for line in held)


def _cell(record: SweepRecord, rows: Sequence[TrialRow], worst: float, best: float) -> Cell:
    """The best completed trial of a cell, or why there is none."""
    scored = [
        (score, -row.trial, row) for row in rows if (score := score_of(row, record.objective)) is not None
    ]
    if not scored:
        ends = [row.status for row in rows]
        return Cell(next((SHORT[status] for status in _WORST_FIRST if status in ends), ""))
    score, _, row = max(scored, key=lambda entry: entry[:2])
    value = objective_value(record, row)
    return Cell(objective_text(record, value or 0.0), value, _strength(score, worst, best), row.trial)


def _strength(score: float, worst: float, best: float) -> float:
    return part_of(score, worst, best, worst > 0 and best / worst >= LOG_FROM) if best > worst else 1.0


def is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and finite(value) is not None


def _key(value: Any) -> str:
    return point_key({"": value})
