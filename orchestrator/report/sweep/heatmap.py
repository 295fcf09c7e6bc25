"""The objective over two settings as cells of a heat map, for the picture and the page.

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
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep.facts import (
    SHORT_STATUS,
    objective_text,
    objective_value,
    short_value,
    swept_settings,
)

MAX_LEVELS = 8
"""A setting with more numbers than this is divided into bins."""
NUM_BINS = 6
MAX_WORDS = 12
LOG_RATIO = 8.0
"""Positive numbers whose largest is at least this many times the smallest get a logarithmic scale."""
_WORST_FIRST = ("out_of_memory", "failed", "infeasible", "stopped")


@dataclass(frozen=True)
class Levels:
    """The values of a setting in order, and the place of each value."""

    labels: tuple[str, ...]
    places: Mapping[str, int]

    def place(self, value: Any) -> int:
        return self.places[_key(value)]


@dataclass(frozen=True)
class Cell:
    """The best trial of a cell; without a completed one only a text that says why."""

    text: str
    value: float | None = None
    strength: float = 0.0
    """From 0, the worst cell, to 1, the best."""
    trial: int | None = None


@dataclass(frozen=True)
class HeatMap:
    """Cells by row and column. ``y`` is empty if only one setting was swept."""

    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    others: tuple[str, ...]
    """Swept settings that the map does not show: each cell has the best trial over them."""


def heat_map(record: SweepRecord) -> HeatMap | None:
    """Return the heat map; None if nothing was swept or measured."""
    names = swept_settings(record)
    if not names or not record.ranked():
        return None
    chosen = sorted(names, key=lambda name: -setting_effect(record, name))[:2]
    levels = {name: setting_levels([row.point.get(name) for row in record.rows]) for name in chosen}
    # The setting with more values goes along the longer side.
    x, *rest = sorted(chosen, key=lambda name: -len(levels[name].labels))
    y = rest[0] if rest else ""
    y_levels = levels[y] if y else Levels(("",), {})
    y_places = [y_levels.place(row.point.get(y)) if y else 0 for row in record.rows]
    x_places = [levels[x].place(row.point.get(x)) for row in record.rows]
    return HeatMap(
        x=x,
        y=y,
        columns=levels[x].labels,
        rows=y_levels.labels,
        cells=_cells(record, x_places, y_places, (len(y_levels.labels), len(levels[x].labels))),
        others=tuple(name for name in names if name not in chosen),
    )


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
        labels = [short_value(value) for value in numbers]
    for value in distinct.values():
        if not is_number(value):
            places[_key(value)] = min(len(labels), MAX_WORDS)
            labels.append(short_value(value))
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


def _cells(
    record: SweepRecord, x_places: Sequence[int], y_places: Sequence[int], shape: tuple[int, int]
) -> tuple[tuple[Cell, ...], ...]:
    import pandas as pd

    trials: Frame = pd.DataFrame({"y": y_places, "x": x_places, "trial": [row.trial for row in record.rows]})
    scores = {row.trial: row.score(record.objective) for row in record.ranked()}
    trials["score"] = trials["trial"].map(scores)
    ends = [_WORST_FIRST.index(row.status) if row.status in _WORST_FIRST else None for row in record.rows]
    trials["end"] = pd.Series(ends, dtype="Int64")
    # After sorting, the first trial of each cell is its best, or the one with the worst end.
    best = _by_cell(
        trials.dropna(subset="score")
        .sort_values(["score", "trial"], ascending=[False, True])
        .drop_duplicates(["y", "x"]),
        "trial",
    )
    worst_end = _by_cell(trials.dropna(subset="end").sort_values("end").drop_duplicates(["y", "x"]), "end")
    rows = {row.trial: row for row in record.rows}
    cell_scores = [scores[trial] or 0.0 for trial in best.values()]
    span = (min(cell_scores), max(cell_scores))

    def cell(place: tuple[int, int]) -> Cell:
        if place in best:
            return _measured_cell(record, rows[best[place]], span)
        return Cell(SHORT_STATUS[_WORST_FIRST[worst_end[place]]] if place in worst_end else "")

    height, width = shape
    return tuple(tuple(cell((y, x)) for x in range(width)) for y in range(height))


def _by_cell(trials: Frame, column: str) -> dict[tuple[int, int], int]:
    places = zip(trials["y"].tolist(), trials["x"].tolist(), strict=True)
    return dict(zip(places, trials[column].tolist(), strict=True))


def _measured_cell(record: SweepRecord, row: TrialRow, span: tuple[float, float]) -> Cell:
    worst, best = span
    score = row.score(record.objective) or 0.0
    strength = relative_place(score, worst, best, is_log(worst, best)) if best > worst else 1.0
    value = objective_value(record, row)
    return Cell(objective_text(record, value or 0.0), value, strength, row.trial)


def is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and finite(value) is not None


def _key(value: Any) -> str:
    return point_key({"": value})
