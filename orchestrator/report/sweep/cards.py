"""The pictures of a sweep on its page: curves, heat map and parallel coordinates as HTML and inline SVG, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.record.ledger import SweepRecord
from orchestrator.report.draw.axes import Axis
from orchestrator.report.run.panels import PanelCurve, Panel, Points
from orchestrator.report.run.sections import heading
from orchestrator.report.run.svg import SPAN, chart, esc
from orchestrator.report.sweep.facts import (
    in_words,
    objective_name,
    objective_text,
    objective_value,
    point_text,
    series_label,
    swept,
)
from orchestrator.report.sweep.heatmap import Cell, HeatMap, heat_map
from orchestrator.report.sweep.parallel_coords import SPREAD, Line, Parallel, Scale, parallel
from orchestrator.report.sweep.scaling import Series, interval_of, series_of, speed_of

MOST_SERIES = 6
NEAR = 0.06
"""Marks nearer than this part of an axis would touch one another."""
MARGIN = 0.08
"""Room before the first mark: the name of the axis stands below it."""
STRONG = 0.62
"""From this strength on a colour asks for light text."""
_KINDS = (
    ("strong", "Strong scaling", "the global batch stays"),
    ("weak", "Weak scaling", "each device keeps its batch"),
)


class DevicePanel(Panel):
    """A panel marked at the numbers of devices that were measured."""

    @property
    def x_axis(self) -> Axis:
        counts = sorted({x for curve in self.curves for x, _ in curve.points})
        low, high, marks = counts[0], counts[-1], counts[-1:]
        for count in reversed(counts[:-1]):
            if marks[0] - count >= NEAR * (high - low):
                marks.insert(0, count)
        return Axis(low - MARGIN * (high - low), high, False, tuple(marks))


def scaling_charts(record: SweepRecord) -> str:
    """Throughput and efficiency over the devices, strong and weak apart. Faint lines are the ideal."""
    cards = []
    for kind, name, about in _KINDS:
        found = series_of(record, kind)[:MOST_SERIES]  # type: ignore[arg-type]
        if found:
            labels = [series_label(series, found) for series in found]
            cards += [
                chart(_speed_panel(f"{name}: throughput", found, labels)),
                chart(_efficiency_panel(f"{name}: efficiency", about, found, labels)),
            ]
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _speed_panel(title: str, found: Sequence[Series], labels: Sequence[str]) -> Panel:
    curves = []
    for color, (series, label) in enumerate(zip(found, labels, strict=True)):
        rates = [
            (float(point.devices), speed_of(point.row) or 0.0, interval_of(point.row) or 0.0)
            for point in series.points
        ]
        base = rates[0][1] / rates[0][0]
        curves.append(PanelCurve("ideal", [(devices, base * devices) for devices, *_ in rates], "raw", color))
        curves.append(PanelCurve(label, [(devices, rate) for devices, rate, _ in rates], "dots", color))
        curves.append(
            PanelCurve(
                label,
                _whiskers([(devices, rate, rate * part) for devices, rate, part in rates]),
                "raw",
                color,
            )
        )
    return DevicePanel(title, tuple(curves), "samples/s", "devices", from_zero=True)


def _efficiency_panel(title: str, about: str, found: Sequence[Series], labels: Sequence[str]) -> Panel:
    curves = []
    for color, (series, label) in enumerate(zip(found, labels, strict=True)):
        parts = [
            (float(point.devices), 100 * point.efficiency, 100 * (point.uncertainty or 0.0))
            for point in series.points
        ]
        curves.append(PanelCurve(label, [(devices, part) for devices, part, _ in parts], "dots", color))
        curves.append(PanelCurve(label, _whiskers(parts), "raw", color))
    ends = [
        float(devices)
        for devices in (min(s.base_devices for s in found), max(s.points[-1].devices for s in found))
    ]
    return DevicePanel(
        title,
        (PanelCurve("ideal", [(end, 100.0) for end in ends], "raw", 5), *curves),
        f"%, {about}",
        "devices",
        from_zero=True,
    )


def _whiskers(points: Sequence[tuple[float, float, float]]) -> Points:
    """An upright line through each point, as long as its interval."""
    return [end for x, y, reach in points for end in ((x, y - reach), (x, y + reach), (x, math.nan))]


def heat_card(record: SweepRecord) -> str:
    found = heat_map(record)
    if found is None:
        return ""
    settings = in_words(found.x) + (f" and {in_words(found.y)}" if found.y else "")
    beside = f"best over {', '.join(map(in_words, found.others))}" if found.others else ""
    caption = f'<figcaption>{esc(f"{objective_name(record).capitalize()} by {settings}")} <span class="unit">{esc(beside)}</span></figcaption>'
    head = "".join(f'<th scope="col">{esc(text)}</th>' for text in found.columns)
    corner = "<br>".join(
        esc(name) for name in ([f"{in_words(found.y)} ↓"] if found.y else []) + [f"{in_words(found.x)} →"]
    )
    body = "".join(_heat_row(found, place) for place in range(len(found.rows)))
    table = (
        f'<table class="cells"><thead><tr><th>{corner}</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<figure class="card chart">{caption}<div class="scroll" style="border:0">{table}</div></figure>'


def _heat_row(found: HeatMap, place: int) -> str:
    return f'<tr><th scope="row">{esc(found.rows[place])}</th>{"".join(map(_heat_cell, found.cells[place]))}</tr>'


def _heat_cell(cell: Cell) -> str:
    if cell.value is None:
        return f'<td class="{"none" if cell.text else "empty"}">{esc(cell.text)}</td>'
    looks = [
        name for name, holds in (("strong", cell.strength > STRONG), ("best", cell.strength == 1)) if holds
    ]
    about = f' class="{" ".join(looks)}"' if looks else ""
    return f'<td{about} style="--much:{8 + 92 * cell.strength:.0f}%" title="trial {cell.trial}">{esc(cell.text)}</td>'


def parallel_card(record: SweepRecord) -> str:
    found = parallel(record)
    if found is None:
        return ""
    last = len(found.scales) - 1
    upright = "".join(f"M{_across(at, last)} 0V{SPAN}" for at in range(last + 1))
    names = swept(record)
    lines = "".join(
        _parallel_line(line, last, _about(record, line, names), line is found.lines[-1])
        for line in found.lines
    )
    about = f"{len(found.lines)} trials over {', '.join(scale.name for scale in found.scales)}"
    svg = (
        f'<svg viewBox="0 0 {SPAN} {SPAN}" preserveAspectRatio="none" role="img" aria-label="{esc(about)}">'
        f'<path class="gridline" d="{upright}"/>{lines}</svg>'
    )
    labels = "".join(_scale_labels(scale, at, last) for at, scale in enumerate(found.scales))
    return f'<figure class="card chart">{_parallel_caption(record, found)}<div class="plot parallel">{svg}{labels}</div></figure>'


def _parallel_caption(record: SweepRecord, found: Parallel) -> str:
    told = f"a line for each trial, stronger with {'lower' if found.best_low else 'higher'} {objective_name(record)}"
    key = '<span class="keys"><span class="key" style="--c:var(--c1)">best</span></span>'
    return f'<figcaption>Settings and outcome <span class="unit">{esc(told)}</span>{key}</figcaption>'


def _about(record: SweepRecord, line: Line, names: Sequence[str]) -> str:
    value = objective_value(record, line.row) or 0.0
    settings = ", ".join(f"{in_words(name)} {point_text(line.row, name)}" for name in names)
    return f"<title>{esc(f'trial {line.row.trial}: {settings}: {objective_text(record, value)} {objective_name(record)}')}</title>"


def _parallel_line(line: Line, last: int, about: str, best: bool) -> str:
    look = (
        "--c:var(--c1);stroke-width:3.2"
        if best
        else f"--c:color-mix(in srgb,var(--c0) {15 + 85 * line.strength:.0f}%,var(--line))"
    )
    return f'<path class="{"line" if best else "thin"}" style="{look}" d="{_course(line.places, last)}">{about}</path>'


def _course(places: Sequence[float], last: int) -> str:
    """From axis to axis in bends that leave each of them level."""
    steps = [f"M0 {_down(places[0])}"]
    for at, (here, there) in enumerate(pairwise(places)):
        steps.append(
            f"C{_across(at + 0.42, last)} {_down(here)} {_across(at + 0.58, last)} {_down(there)} {_across(at + 1, last)} {_down(there)}"
        )
    return "".join(steps)


def _scale_labels(scale: Scale, at: int, last: int) -> str:
    left = 100 * at / last
    marks = [
        f'<span class="tag" style="right:{100 - left:.1f}%;bottom:{100 * _inside(place):.1f}%">{esc(text)}</span>'
        for place, text in scale.marks
    ]
    return "".join(marks) + f'<span class="x" style="left:{left:.1f}%">{esc(scale.name)}</span>'


def _across(at: float, last: int) -> str:
    return f"{SPAN * at / last:.0f}"


def _down(place: float) -> str:
    return f"{SPAN * (1 - _inside(place)):.0f}"


def _inside(place: float) -> float:
    """Lines through the ends of an axis are drawn apart too, and stay within the frame."""
    return (place + SPREAD) / (1 + 2 * SPREAD)


def pictures(record: SweepRecord) -> str:
    cards = [card for card in (heat_card(record), parallel_card(record)) if card]
    return f'{heading("What matters")}<div class="grid one">{"".join(cards)}</div>' if cards else ""
