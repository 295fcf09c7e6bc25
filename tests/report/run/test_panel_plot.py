"""Tests of the drawings of panels."""

import math

import pytest

from orchestrator.report.draw.marks import Dots, Path, Values
from orchestrator.report.run.figures.panels import Panel, PanelCurve
from orchestrator.report.run.panel_plot import BAD, panel_plot

TRAIN = PanelCurve("train", [(1.0, 2.0), (3.0, 1.0)])


def marks_of(plot, kind):
    return [mark for mark in plot.marks if isinstance(mark, kind)]


def test_a_plot_has_curves_a_legend_and_a_scale():
    plot = panel_plot(Panel("Loss", (TRAIN, PanelCurve("validation", [(3.0, 1.5)], "dots", 1)), "nats"))
    assert [values.label for values in marks_of(plot, Values)] == ["train", "validation"]
    assert plot.scale is not None
    assert plot.scale.x == (1.0, 3.0)
    assert [key.text for key in plot.keys] == ["train", "validation"]
    assert plot.unit == "nats"
    assert len(marks_of(plot, Dots)) == 1


def test_a_gap_interrupts_the_line():
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, 1.0), (3.0, 2.0)]
    plot = panel_plot(Panel("x", (PanelCurve("a", points),), non_finite_steps=(1.0,)))
    broken, line = marks_of(plot, Path)
    assert [letter for letter, _ in line.steps] == ["M", "M", "L"]
    assert broken.stroke == BAD
    (values,) = marks_of(plot, Values)
    assert len(values.points) == 3


def test_a_panel_without_numbers_is_drawn():
    plot = panel_plot(Panel("Loss", (), non_finite_steps=(1.0, 2.0)))
    assert [key.text for key in plot.keys] == ["nan or infinite"]


def test_bars_stand_on_the_lower_edge():
    plot = panel_plot(Panel("t", (PanelCurve("t", [(1.0, 3.0), (2.0, 4.0)], "bars"),), from_zero=True))
    (bars,) = marks_of(plot, Path)
    heights = [y for letter, points in bars.steps for _, y in points]
    assert heights.count(0.0) == 4
    assert max(heights) == pytest.approx(plot.y_ticks[-1][0], abs=0.1)


def test_curves_of_one_colour_differ_by_their_dashes():
    curves = tuple(PanelCurve(str(color), TRAIN.points, color=color) for color in range(13))
    keys = panel_plot(Panel("x", curves)).keys
    assert len({(key.color, key.dash) for key in keys}) == 13
