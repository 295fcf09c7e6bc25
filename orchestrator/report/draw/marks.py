"""Drawings as plain values, in logical units: ``page_plot`` draws them as SVG, ``image`` as PNG.

A plot is the unit square: x from its left edge to its right one, y from its lower edge to its upper one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge."""
Step = tuple[Literal["M", "L", "Q", "C", "Z"], tuple[Point, ...]]
"""A command of an SVG path with its points."""
Tick = tuple[float, str]
Anchor = Literal["left", "middle", "right"]

NUM_COLORS = 6


@dataclass(frozen=True)
class Color:
    """A colour of the theme by its name, mixed with a ground."""

    name: str
    share: float = 1.0
    ground: str = "fill"


INK = Color("ink")
MUTED = Color("muted")
LINE = Color("line")
CARD = Color("card")


def series_color(index: int, share: float = 1.0) -> Color:
    """Return the colour of a series, paler with a share below 1."""
    return Color(f"c{index % NUM_COLORS}", share, "card")


@dataclass(frozen=True)
class Path:
    """Lines, curves or areas. Widths and dashes are in pixels, of a square plot in its thousandths."""

    steps: tuple[Step, ...]
    stroke: Color | None = None
    fill: Color | None = None
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Dots:
    """Points that stay round when the plot is stretched."""

    points: tuple[Point, ...]
    color: Color


@dataclass(frozen=True)
class Disc:
    """A disc, a slice or a part of a ring, in a square plot. Angles are turns from the top, clockwise."""

    center: Point
    radius: float
    color: Color
    begin: float = 0.0
    end: float = 1.0
    hole: float = 0.0
    """Radius of the hole of a ring."""


@dataclass(frozen=True)
class Text:
    place: Point
    text: str
    anchor: Anchor = "middle"
    color: Color = INK
    room: float | None = None
    """Width beyond which the text is cut."""
    size: float | None = None
    """Height in a square plot; by default that of the labels of axes."""
    is_tag: bool = False
    """Whether the text has a ground of its own, since lines pass below it."""


@dataclass(frozen=True)
class Cells:
    """Rows of coloured cells from the upper edge down."""

    box: Box
    colors: tuple[tuple[Color, ...], ...]


@dataclass(frozen=True)
class Hatch:
    """An area without a value."""

    box: Box


@dataclass(frozen=True)
class Group:
    """Marks that show a text under the pointer."""

    marks: tuple[Path | Disc | Text, ...]
    text: str


@dataclass(frozen=True)
class Values:
    """A curve whose nearest value is shown under the pointer."""

    label: str
    points: tuple[Point, ...]


Mark = Path | Dots | Disc | Text | Cells | Hatch | Group | Values


@dataclass(frozen=True)
class Key:
    """An entry of a legend; without a colour only its text."""

    text: str
    color: Color | None = None
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scale:
    """Both axes of a plot, from which the page computes the values under the pointer."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_is_log: bool = False
    y_is_log: bool = False
    name: str = ""
    """Of the x axis."""
    is_count: bool = True
    """Whether x is a whole number."""


@dataclass(frozen=True)
class Plot:
    title: str
    marks: tuple[Mark, ...]
    description: str
    """For readers who do not see the drawing."""
    unit: str = ""
    remark: str = ""
    """At the end of the line of the title."""
    keys: tuple[Key, ...] = ()
    x_label: str = ""
    y_label: str = ""
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    grid: Literal["", "x", "xy"] = ""
    """The ticks with a line across the plot."""
    height: int = 180
    """In pixels."""
    min_width: int = 0
    """In pixels; on a narrower screen the plot scrolls, so that its texts do not touch each other."""
    is_square: bool = False
    scale: Scale | None = None


@dataclass(frozen=True)
class Picture:
    """An image file: plots in rows below a title."""

    title: str
    plots: Sequence[Plot | None]
    """None leaves a place empty."""
    num_columns: int = 1
    keys: tuple[Key, ...] = ()
    """One legend for all plots, below them, in place of a legend for each."""
    color_key: Plot | None = None


def line(*points: Point, stroke: Color, width: float = 1.0, dash: tuple[float, ...] = ()) -> Path:
    return Path(polyline(points), stroke, width=width, dash=dash)


def polyline(points: Iterable[Point]) -> tuple[Step, ...]:
    return tuple(("L" if index else "M", (point,)) for index, point in enumerate(points))


def area(box: Box, fill: Color | None = None, stroke: Color | None = None, width: float = 1.0) -> Path:
    left, lower, right, upper = box
    corners = ((left, lower), (right, lower), (right, upper), (left, upper))
    return Path((*polyline(corners), ("Z", ())), stroke, fill, width)


def flat(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Return marks with those of groups."""
    for mark in marks:
        if isinstance(mark, Group):
            yield from mark.marks
        else:
            yield mark


def color_key(title: str, low: Color, middle: Color, high: Color, ticks: Sequence[tuple[float, str]]) -> Plot:
    """Return the meaning of colours between two ends."""
    num_cells = 120
    cells = []
    for index in range(num_cells):
        place = 2 * (index + 0.5) / num_cells - 1
        end = high if place > 0 else low
        cells.append(Color(end.name, abs(place) * end.share, middle.name))
    return Plot(title, (Cells((0, 0, 1, 1), (tuple(cells),)),), title, x_ticks=tuple(ticks), height=10)
