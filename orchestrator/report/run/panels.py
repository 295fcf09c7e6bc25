"""What there is to draw of a run, as plain points: the pictures and the page show the same panels from here.

A long run has more steps than a screen has columns, a short one a single point, and a diverged one no number at all:
all three are settled here, so that whoever draws needs no special case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from orchestrator.report.draw.axes import Axis, step_axis, value_axis
from orchestrator.report.run.read import RunRecord, entries, finite, number, remembered, section
from orchestrator.report.run.stats import metric_names, score, unit_name
from orchestrator.types import GIB

Points = list[tuple[float, float]]
"""In order of x. A y of nan is a gap: the line ends and begins anew."""
Look = Literal["raw", "line", "dots", "bars"]

MAX_POINTS = 600
MAX_DOTS = 100
MAX_BARS = 40
MAX_MARKS = 20
MAX_METRICS = 8
HUGE = 1e100
"""From here on a value counts as infinite: the arithmetic of axes would overflow."""
SMOOTH_FROM = 30
"""Series shorter than this are shown as they are."""


@dataclass(frozen=True)
class PanelCurve:
    label: str
    points: Points
    look: Look = "line"
    color: int = 0


@dataclass(frozen=True)
class Panel:
    """One chart: its curves, and the steps worth marking on its x axis."""

    title: str
    curves: tuple[PanelCurve, ...]
    unit: str = ""
    x_label: str = "step"
    from_zero: bool = False
    top: float | None = None
    span: tuple[float, ...] = ()
    """Steps the x axis shall reach, so that charts of one run stand under one another."""
    marks: tuple[tuple[float, str], ...] = ()
    broken: tuple[float, ...] = ()
    """Steps whose value was nan or infinite."""

    @property
    def needs_key(self) -> bool:
        """Whether the title alone leaves open what is shown."""
        return len({curve.color for curve in self.curves}) > 1 or any(
            curve.look == "dots" for curve in self.curves
        )

    @property
    def x_axis(self) -> Axis:
        xs = [x for curve in self.curves for x, _ in curve.points]
        return step_axis(
            [*xs, *self.broken, *self.span], bars=any(curve.look == "bars" for curve in self.curves)
        )

    @property
    def y_axis(self) -> Axis:
        return value_axis(
            (y for curve in self.curves for _, y in curve.points if not math.isnan(y)),
            self.from_zero,
            self.top,
        )


@remembered
def panels(record: RunRecord) -> list[Panel]:
    """How the training went: the panels that have something to show, in reading order."""
    names = metric_names(record)[:MAX_METRICS]
    quality = [_scored(record, "loss"), *[_scored(record, name) for name in names]]
    return _shown(record, [*quality, _epoch_time(record), _norm(record), _rate(record), _speed(record)])


def device_panels(record: RunRecord) -> list[Panel]:
    """What the monitor saw of devices and host."""
    cpu, process = (
        _host_curves(record, "host cpu", "cpu_percent", 1),
        _host_curves(record, "process", "process_memory", GIB),
    )
    use, held, power = (
        _device_curves(record, name, unit)
        for name, unit in (("utilization", 1), ("memory_used", GIB), ("power", 1))
    )
    return _shown(
        record,
        [
            Panel("Utilization", (*use, *cpu), "%", from_zero=True, top=100.0),
            Panel("Memory in use", (*held, *process), "GiB", from_zero=True),
            Panel("Power", tuple(power), "W", from_zero=True),
        ],
    )


def smooth(points: Points) -> Points:
    """An exponential mean over about a thirtieth of the series, unbiased at its beginning."""
    keep = 1 - 2 / (max(1.0, len(points) / 30) + 1)
    mean, weight, result = 0.0, 0.0, []
    for x, y in points:
        if not math.isnan(y):
            mean = keep * mean + (1 - keep) * y
            weight = keep * weight + (1 - keep)
        result.append((x, y if math.isnan(y) else mean / weight))
    return result


def decimate(points: Points, limit: int = MAX_POINTS) -> Points:
    """About ``limit`` points that look the same: of each bucket its smallest and largest, so no spike is lost."""
    if len(points) <= limit:
        return points
    buckets = limit // 2 - 1
    edges = [index * len(points) // buckets for index in range(buckets + 1)]
    kept = {0, len(points) - 1}
    for begin, end in pairwise(edges):
        kept |= _telling(points, range(begin, end))
    return [points[index] for index in sorted(kept)]


def _telling(points: Points, bucket: range) -> set[int]:
    """The points of a bucket that the eye would miss: its extremes, and a gap."""
    gaps = [index for index in bucket if math.isnan(points[index][1])]
    known = [index for index in bucket if not math.isnan(points[index][1])]
    picks = {pick(known, key=lambda index: points[index][1]) for pick in (min, max)} if known else set()
    return picks | set(gaps[:1])


def _shown(record: RunRecord, found: Iterable[Panel]) -> list[Panel]:
    """Without curves that have no number to show, and without panels that then show nothing; steps on one scale."""
    span = tuple(float(event["step"]) for event in (*record.steps[:1], *record.steps[-1:]))
    kept = [
        replace(
            panel,
            curves=tuple(filter(_has_number, panel.curves)),
            span=span if panel.x_label == "step" else (),
        )
        for panel in found
    ]
    return [panel for panel in kept if panel.curves or panel.broken]


def _has_number(curve: PanelCurve) -> bool:
    return any(not math.isnan(y) for _, y in curve.points)


def _points(pairs: Iterable[tuple[int, Any]]) -> Points:
    """Pairs that have a number; one that no axis can show makes a gap."""
    known = [(float(x), y) for x, value in pairs if (y := number(value)) is not None]
    return [(x, y if abs(y) < HUGE else math.nan) for x, y in known]


def _eased(label: str, points: Points, color: int = 0) -> tuple[PanelCurve, ...]:
    """A noisy series: pale as it is, and strong as it runs on average."""
    if len(points) < SMOOTH_FROM:
        return (PanelCurve(label, points, "line", color),)
    return (
        PanelCurve(f"{label}, each step", decimate(points), "raw", color),
        PanelCurve(label, decimate(smooth(points)), "line", color),
    )


def _scored(record: RunRecord, name: str) -> Panel:
    """The loss or a metric, in training and in evaluation."""
    train = _points((event["step"], score(event, name)) for event in record.steps)
    tested = _points((event["step"], score(event, name)) for event in record.evaluations)
    curves = (*_eased("train", train), PanelCurve("validation", decimate(tested, MAX_DOTS), "dots", 1))
    if name != "loss":
        return Panel(name.replace("_", " ").capitalize(), curves)
    return Panel("Loss", curves, marks=_marks(record), broken=_broken(record, "loss"))


def _marks(record: RunRecord) -> tuple[tuple[float, str], ...]:
    """Where the run was taken up again, recovered or ran out of memory: what a jump in the curve may come from."""
    found = [
        (finite(event.get("step")), event["event"])
        for event in record.events
        if event["event"] in ("resume", "recovery", "oom")
    ]
    # A recovery reads a checkpoint, and says so at the same step.
    return tuple({step: (step, kind) for step, kind in found if step is not None}.values())[:MAX_MARKS]


def _broken(record: RunRecord, name: str) -> tuple[float, ...]:
    values = [(float(event["step"]), number(event.get(name))) for event in record.steps]
    bad = [step for step, value in values if value is not None and not abs(value) < HUGE]
    return tuple(bad[:: -(-len(bad) // MAX_DOTS) or 1])


def _epoch_time(record: RunRecord) -> Panel:
    points = _points((event["epoch"] + 1, event.get("seconds")) for event in record.epochs)
    look: Look = "bars" if len(points) <= MAX_BARS else "line"
    return Panel(
        "Epoch time",
        (PanelCurve("epoch time", decimate(points), look, 2),),
        "s",
        x_label="epoch",
        from_zero=True,
    )


def _norm(record: RunRecord) -> Panel:
    points = _points((event["step"], event.get("grad_norm")) for event in record.steps)
    return Panel("Gradient norm", _eased("gradient norm", points, 3), broken=_broken(record, "grad_norm"))


def _rate(record: RunRecord) -> Panel:
    points = _points((event["step"], event.get("lr")) for event in record.steps)
    return Panel("Learning rate", (PanelCurve("learning rate", decimate(points), "line", 4),), from_zero=True)


def _speed(record: RunRecord) -> Panel:
    """Units (tokens) per second where a sample has several, samples per second elsewhere."""
    timed = [event for event in record.steps if (finite(event.get("seconds")) or 0.0) > 0]
    tokens = any(event.get("units") not in (None, event.get("samples")) for event in timed)
    field, unit = ("units", f"{unit_name(record)}/s") if tokens else ("samples", "samples/s")
    points = _points((event["step"], (finite(event.get(field)) or 0.0) / event["seconds"]) for event in timed)
    return Panel("Throughput", _eased("throughput", points, 5), unit, from_zero=True)


def _host_curves(record: RunRecord, label: str, name: str, unit: float) -> tuple[PanelCurve, ...]:
    points = _points((event["step"], section(event, "host").get(name)) for event in record.monitors)
    return _eased(label, [(x, y / unit) for x, y in points], color=1)


def _device_curves(record: RunRecord, name: str, unit: float) -> list[PanelCurve]:
    series: dict[str, Points] = {}
    for event in record.monitors:
        for device in entries(event, "devices"):
            value = finite(device.get(name))
            if value is not None:
                series.setdefault(f"gpu {device.get('index', 0)}", []).append(
                    (float(event["step"]), value / unit)
                )
    colors = (0, 2, 3, 4, 5)  # 1 is the host's
    named = enumerate(sorted(series.items()))
    return [
        curve
        for index, (label, points) in named
        for curve in _eased(label, points, colors[index % len(colors)])
    ]
