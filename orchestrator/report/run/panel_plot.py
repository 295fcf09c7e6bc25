"""Drawings of panels, for the page and the image files."""

from __future__ import annotations

import math
from itertools import pairwise

from orchestrator.report.draw.axes import Axis, tick_text
from orchestrator.report.draw.marks import (
    MUTED,
    Color,
    Dots,
    Group,
    Key,
    Mark,
    Path,
    Plot,
    Point,
    Scale,
    Step,
    Tick,
    Values,
    area,
    line,
    series_color,
)
from orchestrator.report.run.figures.panels import Panel, PanelCurve

MAX_DOTS = 40
"""More dots would overlap: then the line alone is drawn."""
DASHES = ((), (8.0, 5.0), (2.0, 4.0))
"""They tell curves of one colour apart."""
NUM_COLORS = 6
BAR_WIDTH = 0.62
RAW_SHARE = 0.28
BROKEN_HEIGHT = 0.045
BAD = Color("bad")
WEIGHTS_COLORS = (Color("good"), Color("c3"))
"""Of the step whose weights were kept, and of the best one where it is another."""


def panel_plot(panel: Panel) -> Plot:
    x = panel.x_axis
    y = panel.y_axis
    curves = [mark for curve in panel.curves for mark in _curve_marks(curve, x, y)]
    return Plot(
        panel.title,
        (*_step_marks(panel, x), *curves),
        f"{panel.title} by {panel.x_label}, from {tick_text(y.low)} to {tick_text(y.high)}",
        unit=panel.unit,
        keys=tuple(_keys(panel)),
        x_label=panel.x_label,
        x_ticks=_ticks(x),
        y_ticks=_ticks(y),
        grid="xy",
        scale=Scale((x.low, x.high), (y.low, y.high), x.log, y.log, panel.x_label, panel.counts),
    )


def curve_key(label: str, color: int) -> Key:
    return Key(label, series_color(color), DASHES[color // NUM_COLORS % len(DASHES)])


def _ticks(axis: Axis) -> tuple[Tick, ...]:
    return tuple(zip(map(axis.place, axis.ticks), axis.labels, strict=True))


def _keys(panel: Panel) -> list[Key]:
    keys = []
    if panel.needs_legend:
        keys += [curve_key(curve.label, curve.color) for curve in panel.curves if curve.look != "raw"]
    keys += [Key(text, color) for (_, text), color in zip(panel.weights, WEIGHTS_COLORS, strict=False)]
    if panel.non_finite_steps:
        keys.append(Key("nan or infinite", BAD))
    return keys


def _step_marks(panel: Panel, x: Axis) -> list[Mark]:
    """Return resumes and out-of-memory steps as dashed lines, kept weights as a solid one, and nan and inf
    as red ticks on the lower edge."""
    marks: list[Mark] = []
    for step, kind in panel.marks:
        color = BAD if kind == "oom" else MUTED
        marks.append(Group((_upright(x.place(step), color, 1.0, (3.0, 4.0)),), kind))
    for (step, text), color in zip(panel.weights, WEIGHTS_COLORS, strict=False):
        marks.append(Group((_upright(x.place(step), color, 1.6),), text))
    marks += [
        line((x.place(step), 0.0), (x.place(step), BROKEN_HEIGHT), stroke=BAD, width=1.5)
        for step in panel.non_finite_steps
    ]
    return marks


def _upright(place: float, color: Color, width: float, dash: tuple[float, ...] = ()) -> Path:
    return line((place, 0.0), (place, 1.0), stroke=color, width=width, dash=dash)


def _curve_marks(curve: PanelCurve, x: Axis, y: Axis) -> list[Mark]:
    color = series_color(curve.color)
    places = [(x.place(px), math.nan if math.isnan(py) else y.place(py)) for px, py in curve.points]
    known = tuple(place for place in places if not math.isnan(place[1]))
    if curve.look == "raw":
        return [Path(_with_gaps(places), series_color(curve.color, RAW_SHARE))]
    values = Values(curve.label, known)
    if curve.look == "bars":
        half = BAR_WIDTH / 2 / (x.high - x.low)
        bars = [area((left - half, 0.0, left + half, top), color).steps for left, top in known]
        return [Path(tuple(step for bar in bars for step in bar), fill=color), values]
    key = curve_key(curve.label, curve.color)
    width = 1.4 if curve.look == "dots" else 2.0
    marks: list[Mark] = [Path(_with_gaps(places), color, width=width, dash=key.dash), values]
    if (curve.look == "dots" and len(known) <= MAX_DOTS) or len(known) == 1:
        marks.append(Dots(known, color))
    return marks


def _with_gaps(places: list[Point]) -> tuple[Step, ...]:
    """Return a line that ends before each gap and starts again after it."""
    before = [(math.nan, math.nan), *places]
    return tuple(
        ("M" if math.isnan(last[1]) else "L", (place,))
        for last, place in pairwise(before)
        if not math.isnan(place[1])
    )
