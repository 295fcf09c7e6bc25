"""Pictures of a sweep on its page: curves, heat map and parallel coordinates as HTML and inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.draw.axes import Axis
from orchestrator.report.draw.markup import esc, table
from orchestrator.report.run.figures.panels import Panel, PanelCurve, Points
from orchestrator.report.run.sections import heading
from orchestrator.report.run.svg import SPAN, chart
from orchestrator.report.sweep.facts import (
    name_text,
    objective_name,
    objective_text,
    objective_value,
    series_label,
    setting_text,
    swept_settings,
)
from orchestrator.report.sweep.heatmap import Cell, HeatMap, heat_map
from orchestrator.report.sweep.parallel_coords import SPREAD, Line, ParallelPlot, Scale, parallel_plot
from orchestrator.report.sweep.scaling import Kind, ScalingSeries, series_of

MAX_SERIES = 6
MIN_MARK_DISTANCE = 0.06
"""Marks closer than this part of an axis would touch each other."""
LEFT_MARGIN = 0.08
"""Part of the axis before the first mark: the name of the axis is written below it."""
MAX_PERCENT = 46
"""Share of the colour in the best cell: the text on it stays readable, light and dark."""
"""From this strength on a cell is so dark that it needs light text."""
_IDEAL_COLOR = 5
_KINDS: tuple[tuple[Kind, str, str], ...] = (
    ("strong", "Strong scaling", "the global batch stays"),
    ("weak", "Weak scaling", "each device keeps its batch"),
)


class DevicePanel(Panel):
    """A panel whose x axis is marked at the measured numbers of devices."""

    @property
    def x_axis(self) -> Axis:
        counts = sorted({x for curve in self.curves for x, _ in curve.points})
        low = counts[0]
        high = counts[-1]
        marks = [high]
        # From the right: the largest number of devices always keeps its mark.
        for count in reversed(counts[:-1]):
            if marks[0] - count >= MIN_MARK_DISTANCE * (high - low):
                marks.insert(0, count)
        return Axis(low - LEFT_MARGIN * (high - low), high, False, tuple(marks))


def scaling_charts(record: SweepRecord) -> str:
    """Return throughput and efficiency over the devices, strong and weak apart; faint lines are the ideal."""
    cards = []
    for kind, name, explanation in _KINDS:
        shown = series_of(record, kind)[:MAX_SERIES]
        if shown:
            cards.append(chart(_speed_panel(f"{name}: throughput", shown)))
            cards.append(chart(_efficiency_panel(f"{name}: efficiency", explanation, shown)))
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _speed_panel(title: str, shown: Sequence[ScalingSeries]) -> Panel:
    curves = []
    for color, series in enumerate(shown):
        label = series_label(series, shown)
        devices = [float(count) for count in series.points["devices"]]
        rates = series.points["samples_per_second"].tolist()
        errors = (series.points["samples_per_second"] * series.points["interval"].fillna(0.0)).tolist()
        rate_per_device = rates[0] / devices[0]
        ideal = [(count, rate_per_device * count) for count in devices]
        curves += [
            PanelCurve("ideal", ideal, "raw", color),
            PanelCurve(label, list(zip(devices, rates, strict=True)), "dots", color),
            PanelCurve(label, _error_bars(devices, rates, errors), "raw", color),
        ]
    return DevicePanel(title, tuple(curves), "samples/s", "devices", from_zero=True)


def _efficiency_panel(title: str, explanation: str, shown: Sequence[ScalingSeries]) -> Panel:
    first = float(min(series.base_devices for series in shown))
    last = float(max(series.max_devices for series in shown))
    curves = [PanelCurve("ideal", [(first, 100.0), (last, 100.0)], "raw", _IDEAL_COLOR)]
    for color, series in enumerate(shown):
        label = series_label(series, shown)
        devices = [float(count) for count in series.points["devices"]]
        percents = (100 * series.points["efficiency"]).tolist()
        errors = (100 * series.points["efficiency_interval"].fillna(0.0)).tolist()
        curves += [
            PanelCurve(label, list(zip(devices, percents, strict=True)), "dots", color),
            PanelCurve(label, _error_bars(devices, percents, errors), "raw", color),
        ]
    return DevicePanel(title, tuple(curves), f"%, {explanation}", "devices", from_zero=True)


def _error_bars(xs: Sequence[float], ys: Sequence[float], errors: Sequence[float]) -> Points:
    """Return a vertical line through each point, as long as its interval; nan separates the lines."""
    points: list[tuple[float, float]] = []
    for x, y, error in zip(xs, ys, errors, strict=True):
        points += [(x, y - error), (x, y + error), (x, math.nan)]
    return points


def heat_card(record: SweepRecord) -> str:
    shown = heat_map(record)
    if shown is None:
        return ""
    settings = name_text(shown.x) + (f" and {name_text(shown.y)}" if shown.y else "")
    title = esc(f"{objective_name(record).capitalize()} by {settings}")
    best_over = f"best over {', '.join(map(name_text, shown.others))}" if shown.others else ""
    caption = f'<figcaption>{title} <span class="unit">{esc(best_over)}</span></figcaption>'
    head = "".join(f'<th scope="col">{esc(text)}</th>' for text in shown.columns)
    corner = [f"{name_text(shown.y)} ↓"] if shown.y else []
    corner.append(f"{name_text(shown.x)} →")
    body = "".join(_heat_row(shown, place) for place in range(len(shown.rows)))
    first = f'<th scope="col">{"<br>".join(map(esc, corner))}</th>'
    name = f"{objective_name(record)} by {settings}"
    cells = table(name, first + head, body, "cells")
    return f'<figure class="card chart">{caption}{cells}</figure>'


def _heat_row(shown: HeatMap, place: int) -> str:
    cells = "".join(map(_heat_cell, shown.cells[place]))
    return f'<tr><th scope="row">{esc(shown.rows[place])}</th>{cells}</tr>'


def _heat_cell(cell: Cell) -> str:
    if cell.value is None:
        return f'<td class="{"none" if cell.text else "empty"}">{esc(cell.text)}</td>'
    best = ' class="best"' if cell.strength == 1 else ""
    percent = 4 + MAX_PERCENT * cell.strength
    return f'<td{best} style="--much:{percent:.0f}%" title="trial {cell.trial}">{esc(cell.text)}</td>'


def parallel_card(record: SweepRecord) -> str:
    plot = parallel_plot(record)
    if plot is None:
        return ""
    last = len(plot.scales) - 1
    axes = "".join(f"M{_x(index, last)} 0V{SPAN}" for index in range(last + 1))
    names = swept_settings(record)
    best = plot.lines[-1]
    lines = "".join(
        _parallel_line(line, last, _line_title(record, line, names), line is best) for line in plot.lines
    )
    description = f"{len(plot.lines)} trials over {', '.join(scale.name for scale in plot.scales)}"
    svg = (
        f'<svg viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(description)}">'
        f'<path class="gridline" d="{axes}"/>{lines}</svg>'
    )
    labels = "".join(_scale_labels(scale, index, last) for index, scale in enumerate(plot.scales))
    caption = _parallel_caption(record, plot)
    return f'<figure class="card chart">{caption}<div class="plot parallel">{svg}{labels}</div></figure>'


def _parallel_caption(record: SweepRecord, plot: ParallelPlot) -> str:
    direction = "lower" if plot.best_is_low else "higher"
    explanation = f"a line for each trial, stronger with {direction} {objective_name(record)}"
    key = '<span class="keys"><span class="key" style="--c:var(--c1)">best</span></span>'
    return f'<figcaption>Settings and outcome <span class="unit">{esc(explanation)}</span>{key}</figcaption>'


def _line_title(record: SweepRecord, line: Line, names: Sequence[str]) -> str:
    outcome = objective_text(record, objective_value(record, line.row) or 0.0)
    settings = ", ".join(f"{name_text(name)} {setting_text(line.row, name)}" for name in names)
    title = f"trial {line.row.trial}: {settings}: {outcome} {objective_name(record)}"
    return f"<title>{esc(title)}</title>"


def _parallel_line(line: Line, last: int, title: str, is_best: bool) -> str:
    curve = _curve(line.places, last)
    if is_best:
        return f'<path class="line" style="--c:var(--c1);stroke-width:3.2" d="{curve}">{title}</path>'
    color = f"--c:color-mix(in srgb,var(--c0) {15 + 85 * line.strength:.0f}%,var(--line))"
    return f'<path class="thin" style="{color}" d="{curve}">{title}</path>'


def _curve(places: Sequence[float], last: int) -> str:
    """Return a path from axis to axis in bends that cross each axis horizontally."""
    path = [f"M0 {_y(places[0])}"]
    for index, (left, right) in enumerate(pairwise(places)):
        path.append(
            f"C{_x(index + 0.42, last)} {_y(left)} {_x(index + 0.58, last)} {_y(right)} "
            f"{_x(index + 1, last)} {_y(right)}"
        )
    return "".join(path)


def _scale_labels(scale: Scale, index: int, last: int) -> str:
    left = 100 * index / last
    marks = [
        f'<span class="tag" style="right:{100 - left:.1f}%;bottom:{100 * _inside(place):.1f}%">{esc(text)}</span>'  # noqa: E501
        for place, text in scale.marks
    ]
    return "".join(marks) + f'<span class="x" style="left:{left:.1f}%">{esc(scale.name)}</span>'


def _x(index: float, last: int) -> str:
    return f"{SPAN * index / last:.0f}"


def _y(place: float) -> str:
    return f"{SPAN * (1 - _inside(place)):.0f}"


def _inside(place: float) -> float:
    """Return a place within the frame, although lines through the ends of an axis are spread apart too."""
    return (place + SPREAD) / (1 + 2 * SPREAD)


def picture_cards(record: SweepRecord) -> str:
    cards = heat_card(record) + parallel_card(record)
    return f'{heading("What matters")}<div class="grid one">{cards}</div>' if cards else ""
