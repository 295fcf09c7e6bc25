"""Drawings of a sweep, for its page and its image files: heat map of the two settings with the largest
effect, parallel coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.draw.marks import (
    CARD,
    LINE,
    Color,
    Group,
    Hatch,
    Key,
    Mark,
    Path,
    Plot,
    Step,
    Text,
    Tick,
    area,
    line,
    series_color,
)
from orchestrator.report.sweep.facts import (
    name_text,
    objective_name,
    objective_text,
    objective_value,
    one_line,
    setting_text,
    swept_settings,
)
from orchestrator.report.sweep.heatmap import Cell, heat_map
from orchestrator.report.sweep.parallel_coords import SPREAD, Line, ParallelPlot, parallel_plot

CELL_PX = 42
MIN_CELL_PX = 64
MIN_SCALE_PX = 90
BEST = series_color(1)
WORST_SHARE = 0.04
BEST_SHARE = 0.5
"""Share of the colour in the best cell: the text on it stays readable, light and dark."""
MAX_NAME_CHARS = 24
LEFT_AXIS = 0.08
"""Place of the first axis: its marks are to the left of it."""
RIGHT_AXIS = 0.96


def heat_drawing(record: SweepRecord) -> Plot | None:
    shown = heat_map(record)
    if shown is None:
        return None
    num_rows = len(shown.rows)
    num_columns = len(shown.columns)
    settings = name_text(shown.x) + (f" and {name_text(shown.y)}" if shown.y else "")
    title = f"{objective_name(record).capitalize()} by {settings}"
    marks: list[Mark] = []
    for y, cells in enumerate(shown.cells):
        for x, cell in enumerate(cells):
            box = (x / num_columns, 1 - (y + 1) / num_rows, (x + 1) / num_columns, 1 - y / num_rows)
            marks += _cell_marks(cell, box)
    return Plot(
        title,
        tuple(marks),
        title,
        unit=one_line(f"best over {', '.join(map(name_text, shown.others))}", 66) if shown.others else "",
        x_label=name_text(shown.x),
        y_label=name_text(shown.y) if shown.y else "",
        x_ticks=_centred(shown.columns),
        y_ticks=tuple((1 - place, text) for place, text in _centred(shown.rows)),
        height=CELL_PX * num_rows,
        min_width=MIN_CELL_PX * num_columns,
    )


def _centred(texts: Sequence[str]) -> tuple[Tick, ...]:
    """Return a tick in the middle of each column."""
    return tuple(
        ((place + 0.5) / len(texts), one_line(text, MAX_NAME_CHARS)) for place, text in enumerate(texts)
    )


def _cell_marks(cell: Cell, box: tuple[float, float, float, float]) -> list[Mark]:
    left, lower, right, upper = box
    middle = ((left + right) / 2, (lower + upper) / 2)
    is_known = cell.value is not None
    text = Text(middle, cell.text, room=right - left, color=Color("ink" if is_known else "muted"))
    share = WORST_SHARE + (BEST_SHARE - WORST_SHARE) * cell.strength if is_known else 0.0
    is_best = is_known and cell.strength == 1
    # The cell with the frame stays a little apart from its neighbours.
    inset_x, inset_y = (0.03 * (right - left), 0.06 * (upper - lower))
    frame = area((left + inset_x, lower + inset_y, right - inset_x, upper - inset_y), None, BEST, 2.5)
    if cell.text and not is_known:
        return [Hatch(box), area(box, None, CARD, 2.0), text]
    ground = area(box, Color("c0", share), CARD, 2.0)
    return [Group((ground, *((frame,) if is_best else ()), text), f"trial {cell.trial}" if is_known else "")]


def parallel_drawing(record: SweepRecord) -> Plot | None:
    plot = parallel_plot(record)
    if plot is None:
        return None
    direction = "lower" if plot.best_is_low else "higher"
    names = swept_settings(record)
    curves = [
        Group((_curve(line, plot, line is plot.lines[-1]),), _line_text(record, line, names))
        for line in plot.lines
    ]
    axes = [line((x, _y(-SPREAD)), (x, _y(1 + SPREAD)), stroke=LINE, width=1.5) for x in _axes(plot)]
    return Plot(
        "Settings and outcome",
        (*axes, *curves, *_marks(plot)),
        f"{len(plot.lines)} trials over {', '.join(scale.name for scale in plot.scales)}",
        unit=f"a line for each trial, stronger with {direction} {objective_name(record)}",
        keys=(Key("best", BEST),),
        x_ticks=tuple(
            (x, one_line(scale.name, MAX_NAME_CHARS))
            for x, scale in zip(_axes(plot), plot.scales, strict=True)
        ),
        height=330,
        min_width=MIN_SCALE_PX * len(plot.scales),
    )


def _axes(plot: ParallelPlot) -> list[float]:
    last = len(plot.scales) - 1
    return [LEFT_AXIS + (RIGHT_AXIS - LEFT_AXIS) * index / last for index in range(last + 1)]


def _y(place: float) -> float:
    """Return a place within the plot, although lines through the ends of an axis are spread apart too."""
    return (place + SPREAD) / (1 + 2 * SPREAD)


def _line_text(record: SweepRecord, line: Line, names: Sequence[str]) -> str:
    outcome = objective_text(record, objective_value(record, line.row) or 0.0)
    settings = ", ".join(f"{name_text(name)} {setting_text(line.row, name)}" for name in names)
    return f"trial {line.row.trial}: {settings}: {outcome} {objective_name(record)}"


def _curve(line: Line, plot: ParallelPlot, is_best: bool) -> Path:
    """Return a curve that crosses each axis horizontally, so that lines through one value stay apart."""
    points = list(zip(_axes(plot), map(_y, line.places), strict=True))
    steps: list[Step] = [("M", (points[0],))]
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = 0.42 * (x1 - x0)
        steps.append(("C", ((x0 + bend, y0), (x1 - bend, y1), (x1, y1))))
    if is_best:
        return Path(tuple(steps), BEST, width=3.2)
    return Path(tuple(steps), Color("c0", 0.15 + 0.85 * line.strength, "line"), width=1.4)


def _marks(plot: ParallelPlot) -> list[Mark]:
    return [
        Text((x - 0.006, _y(place)), one_line(text, 20), "right", Color("soft"), is_tag=True)
        for x, scale in zip(_axes(plot), plot.scales, strict=True)
        for place, text in scale.marks
    ]
