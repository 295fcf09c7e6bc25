"""Plots as HTML and inline SVG.

The drawing is stretched to its box, and the labels are HTML text next to it: they stay sharp and
readable at any width.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

from orchestrator.report.draw.html import LIGHT, esc
from orchestrator.report.draw.marks import (
    INK,
    Box,
    Cells,
    Color,
    Disc,
    Dots,
    Group,
    Hatch,
    Key,
    Mark,
    Path,
    Plot,
    Point,
    Text,
    Tick,
    Values,
    flat,
)

SPAN = 1000
"""Side of the square in which marks are drawn, before it is stretched."""
CHAR_PX = 6.8
"""Width of a character of the labels beside a plot."""
MIN_MARGIN_PX = 44
MAX_MARGIN_PX = 150
DOT_PX = 6.5
FULL_TURN = 0.999
SHIFTS = {"left": "0", "middle": "-50%", "right": "-100%"}


def grid(plots: Sequence[Plot], width: str = "") -> str:
    """Return plots as cards in columns; empty without plots."""
    return f'<div class="grid{width}">{"".join(map(card, plots))}</div>' if plots else ""


def card(plot: Plot) -> str:
    """Return a plot as a card: title, legend, drawing, labels, and values under the pointer."""
    unit = f'<span class="unit">{esc(plot.unit)}</span>' if plot.unit else ""
    remark = f'<span class="unit">{esc(plot.remark)}</span>' if plot.remark else ""
    keys = f'<span class="keys">{remark}{keys_row(plot.keys)}</span>'
    return (
        f'<figure class="card chart"><figcaption>{esc(plot.title)} {unit}{keys}</figcaption>'
        f"{drawing(plot)}</figure>"
    )


def drawing(plot: Plot) -> str:
    """Return a plot without its title and its legend."""
    names = (plot.x_label, plot.y_label) if plot.y_label else ()
    longest = max((len(text) for text in (*names, *(text for _, text in plot.y_ticks))), default=0)
    margin = min(MAX_MARGIN_PX, max(MIN_MARGIN_PX, 10 + CHAR_PX * longest))
    box = f"--height:{plot.height}px;--margin:{margin:.0f}px"
    if plot.min_width:
        box += f";min-width:{plot.min_width}px"
    data = f' data-scale="{esc(json.dumps(vars(plot.scale)))}"' if plot.scale is not None else ""
    style = "plot named" if plot.y_label else "plot"
    marks = list(flat(plot.marks))
    ground = "".join(map(_html_box, marks))
    texts = "".join(_html_text(mark) for mark in marks if isinstance(mark, Text))
    html = (
        f'<div class="{style}" style="{box}"{data}>{ground}'
        f'<svg viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(plot.description)}">{_grid(plot)}{shapes(plot.marks)}</svg>{texts}{_ticks(plot)}'
        f"</div>"
    )
    if not plot.min_width:
        return html
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(plot.title)}">{html}</div>'


def color_scale(plot: Plot) -> str:
    """Return the meaning of colours, below the cards that have them."""
    return f'<div class="scale">{esc(plot.title)}{drawing(plot)}</div>'


def keys_row(keys: Iterable[Key]) -> str:
    """Return the entries of a legend."""
    return "".join(map(_key, keys))


def shapes(marks: Iterable[Mark], is_square: bool = False) -> str:
    """Return marks as SVG elements; texts only of a square plot, whose texts grow with it."""
    return "".join(_shape(mark, is_square) for mark in marks)


def css(color: Color) -> str:
    if color.share >= 1:
        return f"var(--{color.name})"
    return f"color-mix(in srgb,var(--{color.name}) {100 * color.share:.0f}%,var(--{color.ground}))"


def path_data(path: Path) -> str:
    return "".join(letter + " ".join(map(_pair, points)) for letter, points in path.steps)


def _key(key: Key) -> str:
    if key.color is None:
        return f"<span>{esc(key.text)}</span>"
    color = css(key.color)
    dash = ""
    if key.dash:
        on, off = key.dash
        dash = f";--on:{on:g}px;--off:{on + off:g}px"
    return f'<span class="key{" dashed" if dash else ""}" style="--c:{color}{dash}">{esc(key.text)}</span>'


def _grid(plot: Plot) -> str:
    vertical = [f"M{_x(place)} 0V{SPAN}" for place, _ in plot.x_ticks] if plot.grid else []
    horizontal = [f"M0 {_y(place)}H{SPAN}" for place, _ in plot.y_ticks] if plot.grid == "xy" else []
    lines = "".join(horizontal + vertical)
    return f'<path class="gridline" d="{lines}"/>' if lines else ""


def _ticks(plot: Plot) -> str:
    room = 100 * min((after[0] - before[0] for before, after in pairwise(plot.x_ticks)), default=1.0)
    left = [
        f'<span class="y" style="bottom:{100 * place:.1f}%" title="{esc(text)}">{esc(text)}</span>'
        for place, text in plot.y_ticks
    ]
    below = [_x_tick(tick, room) for tick in plot.x_ticks]
    name = f'<span class="y-name">{esc(plot.y_label)}</span>' if plot.y_label else ""
    return f'{"".join(left + below)}{name}<span class="axis">{esc(plot.x_label)}</span>'


def _x_tick(tick: Tick, room: float) -> str:
    place, text = tick
    style = f"left:{100 * place:.1f}%;max-width:{room:.1f}%"
    return f'<span class="x" style="{style}" title="{esc(text)}">{esc(text)}</span>'


def _html_box(mark: Mark) -> str:
    """Return cells and hatches, which lie below the SVG: they are images and grounds of the page."""
    if isinstance(mark, Hatch):
        return f'<i class="hatch" style="{_box_style(mark.box)}"></i>'
    if isinstance(mark, Cells):
        source = _data_address([[_pixel(color) for color in row] for row in mark.colors])
        return f'<img class="cells" src="{source}" style="{_box_style(mark.box)}" alt="">'
    return ""


def _box_style(box: Box) -> str:
    left, lower, right, upper = (100 * edge for edge in box)
    return f"left:{left:.2f}%;bottom:{lower:.2f}%;width:{right - left:.2f}%;height:{upper - lower:.2f}%"


def _html_text(text: Text) -> str:
    x, y = text.place
    style = f"left:{100 * x:.1f}%;bottom:{100 * y:.1f}%;transform:translate({SHIFTS[text.anchor]},50%)"
    if text.room is not None:
        style += f";max-width:{100 * text.room:.1f}%"
    if text.color != INK:
        style += f";color:{css(text.color)}"
    return f'<span class="{"text tag" if text.is_tag else "text"}" style="{style}">{esc(text.text)}</span>'


def _shape(mark: Mark, is_square: bool) -> str:
    match mark:
        case Group(marks, text):
            # A second, wide and invisible line is easier to point at.
            reach = "".join(
                f'<path class="reach" d="{path_data(part)}"/>'
                for part in marks
                if isinstance(part, Path) and part.fill is None
            )
            return f"<g>{shapes(marks, is_square)}{reach}<title>{esc(text)}</title></g>"
        case Path():
            return _path(mark)
        case Dots(points, color):
            # Lines of zero length with round ends stay round when the drawing is stretched.
            data = "".join(f"M{_pair(point)}h0" for point in points)
            return f'<path style="stroke:{css(color)};stroke-width:{DOT_PX}" d="{data}"/>'
        case Disc():
            return _disc(mark)
        case Values(label, points):
            places = " ".join(f"{_x(x)},{_y(y)}" for x, y in points)
            return f'<path data-label="{esc(label)}" data-at="{places}"/>'
        case Text() if is_square:
            x, y = mark.place
            size = (mark.size or 0.0) * SPAN
            return (
                f'<text x="{_x(x)}" y="{_y(y)}" font-size="{size:.0f}" style="fill:{css(mark.color)}">'
                f"{esc(mark.text)}</text>"
            )
        case _:
            return ""


def _path(path: Path) -> str:
    parts = []
    if path.stroke is not None:
        parts.append(f"stroke:{css(path.stroke)};stroke-width:{path.width:.3g}")
    if path.fill is not None:
        parts.append(f"fill:{css(path.fill)}")
    if path.dash:
        parts.append(f"stroke-dasharray:{' '.join(f'{part:g}' for part in path.dash)};stroke-linecap:butt")
    return f'<path style="{";".join(parts)}" d="{path_data(path)}"/>'


def _disc(disc: Disc) -> str:
    """Return a disc or a ring as a circle, a part of it as an arc."""
    x, y = disc.center
    # A ring is a thick line on its middle.
    radius = SPAN * ((disc.radius + disc.hole) / 2 if disc.hole else disc.radius)
    color = css(disc.color)
    style = f"fill:{color}"
    if disc.hole:
        style = f"stroke:{color};stroke-width:{SPAN * (disc.radius - disc.hole):.1f};stroke-linecap:butt"
    if disc.end - disc.begin >= FULL_TURN:
        return f'<circle style="{style}" cx="{_x(x)}" cy="{_y(y)}" r="{radius:.1f}"/>'
    first, last = (_on_circle(disc.center, radius / SPAN, turn) for turn in (disc.begin, disc.end))
    is_long = int(disc.end - disc.begin > 0.5)
    arc = f"M{_pair(first)}A{radius:.1f} {radius:.1f} 0 {is_long} 1 {_pair(last)}"
    closed = "" if disc.hole else f"L{_pair(disc.center)}Z"
    return f'<path style="{style}" d="{arc}{closed}"/>'


def _on_circle(center: Point, radius: float, turn: float) -> Point:
    angle = 2 * math.pi * turn
    return (center[0] + radius * math.sin(angle), center[1] + radius * math.cos(angle))


def _pair(point: Point) -> str:
    return f"{_x(point[0])} {_y(point[1])}"


def _x(place: float) -> str:
    return f"{place * SPAN:.1f}".removesuffix(".0")


def _y(place: float) -> str:
    return _x(1 - place)


def _data_address(pixels: Sequence[Sequence[bytes]]) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(pixels)).decode()


def _pixel(color: Color) -> bytes:
    """Return a pixel that is transparent as far as the ground shows, so that it suits light and dark."""
    return bytes.fromhex(LIGHT[color.name][1:]) + bytes([round(255 * color.share)])


def _png(rows: Sequence[Sequence[bytes]]) -> bytes:
    """Return a minimal PNG: 8 bits RGBA, no filter. It needs no matplotlib."""
    body = b"".join(b"\0" + b"".join(row) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
