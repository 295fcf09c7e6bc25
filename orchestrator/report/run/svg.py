"""Charts as HTML and inline SVG.

The drawing is stretched to its box, and the labels are HTML text next to it: they stay sharp and
readable at any width.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.report.draw.axes import Axis, tick_text
from orchestrator.report.draw.markup import esc
from orchestrator.report.run.figures.expert_load import MAX_LOG2, clipped_log2
from orchestrator.report.run.figures.panels import Panel, PanelCurve, Points
from orchestrator.report.run.figures.stats import shares

SPAN = 1000
"""Side of the square in which the curves are drawn, before it is stretched."""
MAX_DOTS = 40
NUM_COLORS = 6
OTHER_COLOR = 5
# Waiting and work other than training get colours that stand out; parts without an entry are grey.
PART_COLORS = {
    "data": 1,
    "forward": 0,
    "backward": 2,
    "communication": 4,
    "optimizer": 3,
    "graph": 0,
    "training": 0,
    "evaluation": 1,
    "checkpoints": 3,
    "recovery": 4,
}
WEIGHTS_COLORS = ("--good", "--c3")
"""Of the step whose weights were kept, and of the best one where it is another."""
COLD = (43, 108, 176)
WARM = (217, 72, 15)
_OPAQUE = bytes((0, 0, 0, 255))

Cells = Sequence[Sequence[float | None]]


def chart(panel: Panel) -> str:
    """Return a panel as a card: title, legend, curves, and values under the pointer."""
    x = panel.x_axis
    y = panel.y_axis
    curves = [_curve(curve, x, y) for curve in panel.curves]
    drawing = "".join([_grid(x, y), _marks(panel, x), *curves])
    description = f"{panel.title} by {panel.x_label}, from {tick_text(y.low)} to {tick_text(y.high)}"
    bounds = f'data-x0="{x.low}" data-x1="{x.high}" data-y0="{y.low}" data-y1="{y.high}"'
    counts = "1" if panel.counts else ""
    axis = f'data-axis="{esc(panel.x_label)}" data-counts="{counts}"'
    scale = f'{bounds} data-log="{"1" if y.log else ""}" {axis}'
    return (
        f'<figure class="card chart">{_caption(panel)}<div class="plot" {scale}>'
        f'<svg viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(description)}">{drawing}</svg>'
        f'{_labels(x, y)}<span class="axis">{esc(panel.x_label)}</span></div></figure>'
    )


def stacked_bar(parts: Mapping[str, float], text: Mapping[str, str]) -> str:
    """Return a bar divided into its parts, with a legend below it."""
    cells = []
    keys = []
    names = []
    for name, share in shares(dict(parts)).items():
        color = PART_COLORS.get(name, OTHER_COLOR)
        cells.append(f'<i style="--c:var(--c{color});flex:{share:.5f}" title="{esc(name)}"></i>')
        label = f"{esc(name)} <b>{esc(text[name])}</b> {_percent(share)}"
        keys.append(f'<span class="key" style="--c:var(--c{color})">{label}</span>')
        names.append(f"{name} {text[name]}")
    bar = f'<div class="stack" role="img" aria-label="{esc(", ".join(names))}">{"".join(cells)}</div>'
    return f'{bar}<div class="parts">{"".join(keys)}</div>'


def labelled_bar(label: str, parts: Iterable[tuple[str, float, int]], total: float, text: str) -> str:
    """Return a labelled bar of (name, size, colour) parts on a common scale."""
    parts = list(parts)
    cells = [
        f'<i style="--c:var(--c{color});width:{100 * size / total:.2f}%" title="{esc(name)}"></i>'
        for name, size, color in parts
    ]
    description = f"{', '.join(name for name, _, _ in parts)}: {text}"
    stack = f'<div class="stack" role="img" aria-label="{esc(description)}">{"".join(cells)}</div>'
    return f'<div class="bar"><span>{esc(label)}</span>{stack}<span>{esc(text)}</span></div>'


def heat_image(rows: Cells, description: str, limit: float = MAX_LOG2, height: int | None = None) -> str:
    """Return ratios to the even share as an image of one pixel per cell.

    An even share is transparent, so that the image suits light and dark pages. Cells without a ratio
    are cut out of the image, and the hatched ground shows.
    """
    height = height or max(96, min(224, 14 * len(rows)))
    style = f"height:{height}px"
    has_gaps = any(ratio is None for row in rows for ratio in row)
    if has_gaps:
        mask = _data_address([[bytes(4) if ratio is None else _OPAQUE for ratio in row] for row in rows])
        style += f";mask:url({mask}) 0 0/100% 100%"
    source = _data_address([[_pixel(ratio, limit) for ratio in row] for row in rows])
    image = f'<img src="{source}" style="{style}" alt="{esc(description)}">'
    return f'<div class="gaps">{image}</div>' if has_gaps else image


def _percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"


def _caption(panel: Panel) -> str:
    keys = []
    if panel.needs_legend:
        named = [curve for curve in panel.curves if curve.look != "raw"]
        keys += [curve_key(curve.label, curve.color) for curve in named]
    keys += [
        f'<span class="key" style="--c:var({color})">{esc(text)}</span>'
        for (_, text), color in zip(panel.weights, WEIGHTS_COLORS, strict=False)
    ]
    if panel.non_finite_steps:
        keys.append('<span class="key" style="--c:var(--bad)">nan or infinite</span>')
    unit = f'<span class="unit">{esc(panel.unit)}</span>' if panel.unit else ""
    return f'<figcaption>{esc(panel.title)} {unit}<span class="keys">{"".join(keys)}</span></figcaption>'


def curve_key(label: str, color: int) -> str:
    """Return a sample of a curve's colour and dashes with its label."""
    style = f"--c:var(--c{color % NUM_COLORS})"
    return f'<span class="key{_dash(color)}" style="{style}">{esc(label)}</span>'


def _grid(x: Axis, y: Axis) -> str:
    horizontal = [f"M0 {_y(y, mark)}H{SPAN}" for mark in y.ticks]
    vertical = [f"M{_x(x, mark)} 0V{SPAN}" for mark in x.ticks]
    return f'<path class="gridline" d="{"".join(horizontal + vertical)}"/>'


def _labels(x: Axis, y: Axis) -> str:
    left = [
        f'<span class="y" style="bottom:{100 * y.place(mark):.1f}%">{esc(text)}</span>'
        for mark, text in zip(y.ticks, y.labels, strict=True)
    ]
    below = [
        f'<span class="x" style="left:{100 * x.place(mark):.1f}%">{esc(text)}</span>'
        for mark, text in zip(x.ticks, x.labels, strict=True)
    ]
    return "".join(left + below)


def _marks(panel: Panel, x: Axis) -> str:
    lines = [
        f'<path class="mark" d="M{_x(x, step)} 0V{SPAN}"><title>{esc(kind)}</title></path>'
        for step, kind in panel.marks
    ]
    lines += [
        f'<path class="weights" style="--c:var({color})" d="M{_x(x, step)} 0V{SPAN}">'
        f"<title>{esc(text)}</title></path>"
        for (step, text), color in zip(panel.weights, WEIGHTS_COLORS, strict=False)
    ]
    non_finite = "".join(f"M{_x(x, step)} {SPAN - 45}V{SPAN}" for step in panel.non_finite_steps)
    return "".join(lines) + (f'<path class="broken" d="{non_finite}"/>' if non_finite else "")


def _curve(curve: PanelCurve, x: Axis, y: Axis) -> str:
    color = f'style="--c:var(--c{curve.color % NUM_COLORS})"'
    if curve.look == "raw":
        return f'<path class="raw" {color} d="{_path(curve.points, x, y)}"/>'
    places = " ".join(f"{_x(x, px)},{_y(y, py)}" for px, py in curve.points if not math.isnan(py))
    hover = f'data-label="{esc(curve.label)}" data-at="{places}"'
    if curve.look == "bars":
        return f'<path class="bars" {color} {hover} d="{_bars(curve.points, x, y)}"/>'
    has_dots = curve.look == "dots" and len(curve.points) <= MAX_DOTS
    dots = _dots(curve.points, x, y) if has_dots or len(curve.points) == 1 else ""
    style = ("thin" if curve.look == "dots" else "line") + _dash(curve.color)
    line = f'<path class="{style}" {color} {hover} d="{_path(curve.points, x, y)}"/>'
    return f'{line}<path class="dots" {color} d="{dots}"/>'


def _dash(color: int) -> str:
    """Return the class of the dashes that tell curves of one colour apart."""
    turn = color // NUM_COLORS
    return f" dash{turn}" if turn else ""


def _path(points: Points, x: Axis, y: Axis) -> str:
    """Return a line that ends before each gap and starts again after it."""
    command = "M"
    steps = []
    for px, py in points:
        if math.isnan(py):
            command = "M"
        else:
            steps.append(f"{command}{_x(x, px)} {_y(y, py)}")
            command = "L"
    return "".join(steps)


def _dots(points: Points, x: Axis, y: Axis) -> str:
    """Return lines of zero length with round ends: such dots stay round when the drawing is stretched."""
    return "".join(f"M{_x(x, px)} {_y(y, py)}h0" for px, py in points if not math.isnan(py))


def _bars(points: Points, x: Axis, y: Axis) -> str:
    width = 0.62 * SPAN / (x.high - x.low)
    corners = [(x.place(px) * SPAN - width / 2, _y(y, py)) for px, py in points if not math.isnan(py)]
    return "".join(f"M{left:.1f} {SPAN}V{top}h{width:.1f}V{SPAN}z" for left, top in corners)


def _x(axis: Axis, value: float) -> str:
    return f"{axis.place(value) * SPAN:.1f}".removesuffix(".0")


def _y(axis: Axis, value: float) -> str:
    return f"{(1 - axis.place(value)) * SPAN:.1f}".removesuffix(".0")


def _data_address(pixels: Sequence[Sequence[bytes]]) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(pixels)).decode()


def _pixel(ratio: float | None, limit: float) -> bytes:
    if ratio is None:
        return bytes(4)
    strength = clipped_log2(ratio, limit) / limit
    return bytes((*(WARM if strength > 0 else COLD), round(255 * abs(strength))))


def _png(rows: Sequence[Sequence[bytes]]) -> bytes:
    """Return a minimal PNG: 8 bits RGBA, no filter. It needs no matplotlib."""
    body = b"".join(b"\0" + b"".join(row) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
