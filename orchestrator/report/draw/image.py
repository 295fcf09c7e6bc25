"""Plots as PNG, laid out as on the page. matplotlib's object API only: no window, no global figure, safe
in any thread. One frame holds everything, since a frame for each plot, with its axes, takes most of the time.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.report.draw.html import LIGHT
from orchestrator.report.draw.marks import (
    INK,
    LINE,
    MUTED,
    Cells,
    Color,
    Disc,
    Dots,
    Hatch,
    Key,
    Mark,
    Path,
    Picture,
    Plot,
    Point,
    Text,
    area,
    flat,
    line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ten inches at 100 dpi fill a page of 1000 pixels; the file has more dots, for finer screens.
WIDTH_PX = 1000
DPI = 160
POINTS = 0.72
"""Points of a pixel of such a page."""
MARGIN_PX = 14
GAP_PX = 30
"""Between columns."""
TITLE_PX = 26
TICKS_PX = 30
KEY_PX = 18
CHAR_PX = 6.3
"""Width of a character of a label."""
MAX_TEXT_CHARS = 70
LABEL_SIZE = 8.0
"""In points."""


def png(picture: Picture) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    target = io.BytesIO()
    FigureCanvasAgg(figure_of(picture)).print_png(target)
    return target.getvalue()


def figure_of(picture: Picture) -> Figure:
    from matplotlib.figure import Figure

    columns = picture.num_columns
    width = (WIDTH_PX - 2 * MARGIN_PX - (columns - 1) * GAP_PX) / columns
    rows = [picture.plots[first : first + columns] for first in range(0, len(picture.plots), columns)]
    if picture.color_key is not None:
        rows.append([picture.color_key])
    heights = [max(_height(plot, width) for plot in row if plot is not None) for row in rows]
    legend = _lines(picture.keys, WIDTH_PX - 2 * MARGIN_PX)
    top = MARGIN_PX + TITLE_PX + sum(heights) + KEY_PX * len(legend) + MARGIN_PX / 2
    figure = Figure(figsize=(WIDTH_PX / 100, top / 100), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH_PX), ylim=(0, top))
    axes.set_autoscale_on(False)
    axes.axis("off")
    page = _Frame(axes, 0.0, 0.0, 1.0, 1.0)
    page.text((MARGIN_PX, top - 18), picture.title, fontsize=12, fontweight="bold")
    top -= MARGIN_PX + TITLE_PX
    for row, height in zip(rows, heights, strict=True):
        for column, plot in enumerate(row):
            if plot is picture.color_key and plot is not None:
                _draw_plot(page, plot, WIDTH_PX / 4, top, WIDTH_PX / 2)
            elif plot is not None:
                _draw_plot(page, plot, MARGIN_PX + column * (width + GAP_PX), top, width)
        top -= height
    for keys in legend:
        _draw_keys(page, keys, MARGIN_PX, top - 4)
        top -= KEY_PX
    return figure


def rgb(color: Color) -> tuple[float, ...]:
    """Return the mixture of a colour and its ground on a light page."""
    top, ground = (bytes.fromhex(LIGHT[name][1:]) for name in (color.name, color.ground))
    share = min(1.0, color.share)
    return tuple((share * a + (1 - share) * b) / 255 for a, b in zip(top, ground, strict=True))


@dataclass(frozen=True)
class _Frame:
    """The place of a plot in the picture, in pixels. Its marks are added in their order."""

    axes: Axes
    left: float
    lower: float
    width: float
    height: float

    def place(self, point: Point) -> Point:
        return (self.left + point[0] * self.width, self.lower + point[1] * self.height)

    def text(self, point: Point, text: str, color: Color = INK, **look: Any) -> None:
        short = text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
        shown: dict[str, Any] = {"fontsize": LABEL_SIZE, "va": "center_baseline"} | look
        # Text between dollar signs is no formula.
        self.axes.text(*self.place(point), short, color=rgb(color), parse_math=False, zorder=3, **shown)

    def add(self, artist: Any) -> None:
        # Artists of one level are drawn in the order in which they were added.
        artist.set_zorder(2)
        self.axes.add_artist(artist)


def _lines(keys: Sequence[Key], room: float) -> list[list[Key]]:
    """Divide a legend into lines."""
    lines: list[list[Key]] = []
    left = 0.0
    for key in keys:
        if _key_width(key) > left:
            lines.append([])
            left = room
        lines[-1].append(key)
        left -= _key_width(key)
    return lines


def _key_width(key: Key) -> float:
    return (34 if key.color is not None else 14) + CHAR_PX * len(key.text)


def _margin(plot: Plot) -> float:
    """Return the width of the labels to the left of a plot."""
    names = (plot.x_label, *(text for _, text in plot.y_ticks))
    return 10 + CHAR_PX * max(map(len, names)) if any(names) else 0.0


def _key_lines(plot: Plot, width: float) -> list[list[Key]]:
    """Return the lines of a legend below the title; none if it fits beside the title."""
    title = TITLE_PX + 1.2 * CHAR_PX * len(plot.title + plot.unit + plot.remark)
    has_room = title + sum(map(_key_width, plot.keys)) <= width
    return [] if has_room else _lines(plot.keys, width)


def _height(plot: Plot, width: float) -> float:
    above = TITLE_PX + KEY_PX * (len(_key_lines(plot, width)) + bool(plot.y_label))
    return above + plot.height + (TICKS_PX if plot.x_ticks else MARGIN_PX)


def _draw_plot(page: _Frame, plot: Plot, left: float, top: float, width: float) -> None:
    """Draw a plot with its labels, at most as wide as that and below a height."""
    unit = f"  ({plot.unit})" if plot.unit else ""
    page.text((left, top - 10), plot.title + unit, fontsize=9.5)
    page.text((left + width, top - 10), plot.remark, MUTED, ha="right")
    lines = _key_lines(plot, width)
    if not lines:
        _draw_keys(page, plot.keys, left + width - sum(map(_key_width, plot.keys)), top - 10)
    for index, keys in enumerate(lines):
        _draw_keys(page, keys, left, top - TITLE_PX - KEY_PX * index - 2)
    lower = top - _height(plot, width) + (TICKS_PX if plot.x_ticks else MARGIN_PX)
    room = width - _margin(plot)
    side = min(room, plot.height) if plot.is_square else room
    frame = _Frame(page.axes, left + _margin(plot) + (room - side) / 2, lower, side, plot.height)
    page.text((left, lower + plot.height + 13), plot.y_label, MUTED)
    page.text((left, lower - 14), plot.x_label, MUTED)
    for place, text in plot.x_ticks:
        if plot.grid:
            _draw(frame, line((place, 0.0), (place, 1.0), stroke=LINE))
        x, y = frame.place((place, 0.0))
        page.text((x, y - 14), text, MUTED, ha="center")
    for place, text in plot.y_ticks:
        if plot.grid == "xy":
            _draw(frame, line((0.0, place), (1.0, place), stroke=LINE))
        x, y = frame.place((0.0, place))
        page.text((x - 8, y), text, MUTED, ha="right")
    for mark in flat(plot.marks):
        _draw(frame, mark, side / 1000 if plot.is_square else 1.0)


def _draw_keys(page: _Frame, keys: Sequence[Key], left: float, middle: float) -> None:
    for key in keys:
        if key.color is not None:
            sample = line((left, middle), (left + 16, middle), stroke=key.color, width=2.0, dash=key.dash)
            box = area((left + 4, middle - 5, left + 14, middle + 5), key.color)
            _draw(page, sample if key.dash else box)
        page.text((left + (20 if key.color is not None else 0), middle), key.text, MUTED)
        left += _key_width(key)


def _draw(frame: _Frame, mark: Mark, unit: float = 1.0) -> None:
    """Draw a mark; ``unit`` is that of its widths, in pixels."""
    from matplotlib.patches import Rectangle, Wedge

    match mark:
        case Path():
            _draw_path(frame, mark, POINTS * unit)
        case Dots(points, color):
            xs, ys = zip(*map(frame.place, points), strict=True)
            frame.axes.plot(xs, ys, "o", color=rgb(color), markersize=4.2, zorder=2)
        case Disc(center, radius, color, begin, end, hole):
            # matplotlib's angles are degrees from the right, counter-clockwise.
            outer, inner = (frame.width * length for length in (radius, hole))
            angles = (90 - 360 * end, 90 - 360 * begin)
            look = {"facecolor": rgb(color), "linewidth": 0}
            frame.add(Wedge(frame.place(center), outer, *angles, width=outer - inner, **look))
        case Text(place, text, anchor, color, _, size):
            look: dict[str, Any] = {"ha": "center" if anchor == "middle" else anchor}
            if size is not None:
                look["fontsize"] = POINTS * size * frame.width
            if mark.is_tag:
                look["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.82, "pad": 1.0}
            frame.text(place, text, color, **look)
        case Cells((left, lower, right, upper), colors):
            (x0, y0), (x1, y1) = frame.place((left, lower)), frame.place((right, upper))
            pixels = [[rgb(color) for color in row] for row in colors]
            look = {"extent": (x0, x1, y0, y1), "aspect": "auto", "interpolation": "nearest"}
            frame.axes.imshow(pixels, zorder=2, **look)
        case Hatch((left, lower, right, upper)):
            (x0, y0), (x1, y1) = frame.place((left, lower)), frame.place((right, upper))
            look = {"facecolor": "white", "edgecolor": LIGHT["line"], "hatch": "////", "linewidth": 0}
            frame.add(Rectangle((x0, y0), x1 - x0, y1 - y0, **look))


def _draw_path(frame: _Frame, path: Path, unit: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    codes = {"M": Curve.MOVETO, "L": Curve.LINETO, "Q": Curve.CURVE3, "C": Curve.CURVE4, "Z": Curve.CLOSEPOLY}
    # Closing a path needs no point, but matplotlib wants one.
    steps = [(codes[letter], point) for letter, points in path.steps for point in points or ((0.0, 0.0),)]
    if not steps:
        return
    width = unit * path.width
    patch = PathPatch(
        Curve([frame.place(point) for _, point in steps], [code for code, _ in steps]),
        facecolor=rgb(path.fill) if path.fill is not None else "none",
        edgecolor=rgb(path.stroke) if path.stroke is not None else "none",
        linewidth=width if path.stroke is not None else 0,
        capstyle="butt" if path.dash else "round",
        joinstyle="round",
    )
    if path.dash:
        # matplotlib's dashes are in widths of the line.
        patch.set_linestyle((0, [unit * part / width for part in path.dash]))
    frame.add(patch)
