"""Charts as HTML and inline SVG. The drawing is stretched to its box, the labels are text beside it: so they stay sharp
and readable at any width. Everything that comes from a record is escaped here."""

from __future__ import annotations

import base64
import html
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.report.draw.axes import Axis, tick_text
from orchestrator.report.run.expert_load import MAX_DOUBLINGS, doublings
from orchestrator.report.run.panels import Panel, PanelCurve, Points
from orchestrator.report.run.stats import shares

SPAN = 1000
"""Side of the square the curves are drawn in, before it is stretched."""
MANY_DOTS = 40
COLORS = 6
# Waiting and work beside the training stand out; what has no colour of its own is grey.
PART_COLORS = {
    "data": 1,
    "forward": 0,
    "backward": 2,
    "communication": 4,
    "optimizer": 3,
    "training": 0,
    "evaluation": 1,
    "checkpoints": 3,
    "recovery": 4,
}
COLD, WARM = (43, 108, 176), (217, 72, 15)

Cells = Sequence[Sequence[float | None]]


def esc(text: object) -> str:
    """Text of anyone's as HTML: neither markup, nor control characters, nor signs that turn the direction of what follows."""
    return html.escape(_UNSEEN.sub("\ufffd", str(text)), quote=True)


_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def chart(panel: Panel) -> str:
    """A panel as a card: title, key, curves, and values under the pointer."""
    x, y = panel.x_axis, panel.y_axis
    lines = [_grid(x, y), _marks(panel, x), *[_curve(curve, x, y) for curve in panel.curves]]
    about = f"{panel.title} by {panel.x_label}, from {tick_text(y.low)} to {tick_text(y.high)}"
    scale = f'data-x0="{x.low}" data-x1="{x.high}" data-y0="{y.low}" data-y1="{y.high}" data-log="{"1" if y.log else ""}"'
    return (
        f'<figure class="card chart">{_caption(panel)}<div class="plot" {scale} data-axis="{esc(panel.x_label)}">'
        f'<svg viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" role="img" aria-label="{esc(about)}">{"".join(lines)}</svg>'
        f'{_labels(x, y)}<span class="axis">{esc(panel.x_label)}</span></div></figure>'
    )


def stacked(parts: Mapping[str, float], text: Mapping[str, str]) -> str:
    """One bar cut into its parts, and what each is below it."""
    share = [(name, part, PART_COLORS.get(name, 5)) for name, part in shares(dict(parts)).items()]
    cells = [
        f'<i style="--c:var(--c{color});flex:{part:.5f}" title="{esc(name)}"></i>'
        for name, part, color in share
    ]
    keys = [
        f'<span class="key" style="--c:var(--c{color})">{esc(name)} <b>{esc(text[name])}</b> {_percent(part)}</span>'
        for name, part, color in share
    ]
    return f'<div class="stack">{"".join(cells)}</div><div class="parts">{"".join(keys)}</div>'


def bar(label: str, parts: Iterable[tuple[str, float, int]], whole: float, text: str) -> str:
    """A labelled bar of (name, size, colour) parts on a common scale."""
    cells = [
        f'<i style="--c:var(--c{color});width:{100 * size / whole:.2f}%" title="{esc(name)}"></i>'
        for name, size, color in parts
    ]
    return f'<div class="bar"><span>{esc(label)}</span><div class="stack">{"".join(cells)}</div><span>{esc(text)}</span></div>'


def heat_image(rows: Cells, about: str, most: float = MAX_DOUBLINGS, height: int | None = None) -> str:
    """Ratios to the even share as a picture of one pixel per cell, see-through where even: it suits light and dark."""
    data = base64.b64encode(_png([[_pixel(ratio, most) for ratio in row] for row in rows])).decode()
    height = height or max(96, min(224, 14 * len(rows)))
    return f'<img src="data:image/png;base64,{data}" style="height:{height}px" alt="{esc(about)}">'


def _percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"


def _caption(panel: Panel) -> str:
    named = [curve for curve in panel.curves if curve.look != "raw"]
    keys = (
        [f'<span class="key" style="--c:var(--c{curve.color})">{esc(curve.label)}</span>' for curve in named]
        if panel.needs_key
        else []
    )
    if panel.broken:
        keys.append('<span class="key" style="--c:var(--bad)">nan or infinite</span>')
    unit = f'<span class="unit">{esc(panel.unit)}</span>' if panel.unit else ""
    return f'<figcaption>{esc(panel.title)} {unit}<span class="keys">{"".join(keys)}</span></figcaption>'


def _grid(x: Axis, y: Axis) -> str:
    across = [f"M0 {_down(y, mark)}H{SPAN}" for mark in y.ticks]
    upright = [f"M{_right(x, mark)} 0V{SPAN}" for mark in x.ticks]
    return f'<path class="gridline" d="{"".join(across + upright)}"/>'


def _labels(x: Axis, y: Axis) -> str:
    marks_y, marks_x = zip(y.ticks, y.labels, strict=True), zip(x.ticks, x.labels, strict=True)
    left = [
        f'<span class="y" style="bottom:{100 * y.at(mark):.1f}%">{esc(text)}</span>' for mark, text in marks_y
    ]
    below = [
        f'<span class="x" style="left:{100 * x.at(mark):.1f}%">{esc(text)}</span>' for mark, text in marks_x
    ]
    return "".join(left + below)


def _marks(panel: Panel, x: Axis) -> str:
    lines = [
        f'<path class="mark" d="M{_right(x, at)} 0V{SPAN}"><title>{esc(kind)}</title></path>'
        for at, kind in panel.marks
    ]
    ticks = "".join(f"M{_right(x, at)} {SPAN - 45}V{SPAN}" for at in panel.broken)
    return "".join(lines) + (f'<path class="broken" d="{ticks}"/>' if ticks else "")


def _curve(curve: PanelCurve, x: Axis, y: Axis) -> str:
    color = f'style="--c:var(--c{curve.color % COLORS})"'
    if curve.look == "raw":
        return f'<path class="raw" {color} d="{_path(curve.points, x, y)}"/>'
    places = " ".join(f"{_right(x, px)},{_down(y, py)}" for px, py in curve.points if not math.isnan(py))
    hover = f'data-label="{esc(curve.label)}" data-at="{places}"'
    if curve.look == "bars":
        return f'<path class="bars" {color} {hover} d="{_bars(curve.points, x, y)}"/>'
    dots = (
        _dots(curve.points, x, y)
        if (curve.look == "dots" and len(curve.points) <= MANY_DOTS) or len(curve.points) == 1
        else ""
    )
    style = "thin" if curve.look == "dots" else "line"
    return f'<path class="{style}" {color} {hover} d="{_path(curve.points, x, y)}"/><path class="dots" {color} d="{dots}"/>'


def _path(points: Points, x: Axis, y: Axis) -> str:
    """A line that ends before each gap and begins anew after it."""
    pen, steps = "M", []
    for px, py in points:
        if math.isnan(py):
            pen = "M"
        else:
            steps.append(f"{pen}{_right(x, px)} {_down(y, py)}")
            pen = "L"
    return "".join(steps)


def _dots(points: Points, x: Axis, y: Axis) -> str:
    """Lines of no length with round ends: dots that stay round when the drawing is stretched."""
    return "".join(f"M{_right(x, px)} {_down(y, py)}h0" for px, py in points if not math.isnan(py))


def _bars(points: Points, x: Axis, y: Axis) -> str:
    width = 0.62 * SPAN / (x.high - x.low)
    left = [(x.at(px) * SPAN - width / 2, _down(y, py)) for px, py in points if not math.isnan(py)]
    return "".join(f"M{at:.1f} {SPAN}V{top}h{width:.1f}V{SPAN}z" for at, top in left)


def _right(axis: Axis, value: float) -> str:
    return f"{axis.at(value) * SPAN:.1f}".removesuffix(".0")


def _down(axis: Axis, value: float) -> str:
    return f"{(1 - axis.at(value)) * SPAN:.1f}".removesuffix(".0")


def _pixel(ratio: float | None, most: float) -> bytes:
    if ratio is None:
        return bytes(4)
    strength = doublings(ratio, most) / most
    return bytes((*(WARM if strength > 0 else COLD), round(255 * abs(strength))))


def _png(rows: Sequence[Sequence[bytes]]) -> bytes:
    """The smallest PNG that does: 8 bits RGBA, no filter."""
    body = b"".join(b"\0" + b"".join(row) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
