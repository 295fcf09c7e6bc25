"""Tests of plots as PNG."""

from typing import Any

from orchestrator.report.draw.image import figure_of, png, rgb
from orchestrator.report.draw.marks import (
    Cells,
    Color,
    Disc,
    Dots,
    Group,
    Hatch,
    Key,
    Picture,
    Plot,
    Text,
    Values,
    area,
    line,
)

RED = Color("bad")
MARKS = (
    line((0, 0), (1, 1), stroke=RED, width=2.0, dash=(3.0, 4.0)),
    area((0, 0, 1, 1), Color("c0", 0.5)),
    Group((Disc((0.5, 0.5), 0.1, RED, end=0.25, hole=0.05), Text((0.5, 0.5), "4", size=0.03)), "hover"),
    Dots(((0.5, 0.5),), RED),
    Cells((0, 0, 1, 1), ((RED, RED), (RED, RED))),
    Hatch((0, 0, 1, 1)),
    Values("hover", ((0.0, 0.0),)),
)


def picture(**look: Any) -> Picture:
    plot = Plot("a plot", MARKS, "", x_ticks=((0.5, "x"),), y_ticks=((0.5, "y"),), **look)
    return Picture("a $run$", [plot, None, plot], 2, (Key("key", RED), Key("dashed", RED, (2.0, 2.0))), plot)


def test_every_mark_is_drawn() -> None:
    assert png(picture()).startswith(b"\x89PNG")
    assert png(picture(is_square=True, grid="xy", keys=(Key("own", RED),))).startswith(b"\x89PNG")


def test_text_is_shown_as_it_is() -> None:
    texts = [text for text in figure_of(picture()).axes[0].texts if text.get_text() == "a $run$"]
    assert not texts[0].get_parse_math()


def test_a_picture_fills_a_page_of_a_thousand_pixels() -> None:
    figure = figure_of(picture())
    assert figure.get_size_inches()[0] * 100 == 1000
    assert figure.get_dpi() >= 150


def test_colours_are_mixed_with_their_ground() -> None:
    assert rgb(Color("card")) == (1.0, 1.0, 1.0)
    assert rgb(Color("ink", 0.0, "card")) == (1.0, 1.0, 1.0)
