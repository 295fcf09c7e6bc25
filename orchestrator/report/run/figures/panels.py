"""The charts of a run as plain points. Image files and the page draw the same panels.

A long run has more steps than a screen has columns, a short one a single point, and a diverged one
no number at all. This module handles all three, so that the drawing code needs no special case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from orchestrator.record.events.kinds import OutOfMemory, Recovery, Resume, Step
from orchestrator.report.draw.axes import Axis, step_axis, time_axis, value_axis
from orchestrator.report.run.figures.read import RunRecord, cached_on_record
from orchestrator.report.run.figures.stats import best_evaluation, metric_names, score, unit_name
from orchestrator.types import GIB

Points = list[tuple[float, float]]
"""Points in order of x. A y of nan is a gap: the line ends there and starts again after it."""
Look = Literal["raw", "line", "dots", "bars"]

MAX_POINTS = 600
MAX_DOTS = 100
MAX_BARS = 40
MAX_MARKS = 20
MAX_METRICS = 8
MAX_VALUE = 1e100
"""From here on a value counts as infinite: the arithmetic of axes would overflow."""
SMOOTH_FROM = 30
"""Series with fewer points are not smoothed."""
HOST_COLOR = 1
GPU_COLORS = (0, 2, 3, 4, 5)


@dataclass(frozen=True)
class PanelCurve:
    label: str
    points: Points
    look: Look = "line"
    color: int = 0


@dataclass(frozen=True)
class Panel:
    """One chart: its curves, and the steps to mark on its x axis."""

    title: str
    curves: tuple[PanelCurve, ...]
    unit: str = ""
    x_label: str = "step"
    """step, epoch, or a time with its unit."""
    counts: bool = True
    """Whether x is a whole number."""
    from_zero: bool = False
    top: float | None = None
    span: tuple[float, ...] = ()
    """Steps or times that the x axis must include, so that all charts of a page have the same axis."""
    marks: tuple[tuple[float, str], ...] = ()
    weights: tuple[tuple[float, str], ...] = ()
    """Steps whose weights the run ended with, or that were the best, each with its words for the legend."""
    non_finite_steps: tuple[float, ...] = ()
    """Steps whose value was nan or infinite."""

    @property
    def needs_legend(self) -> bool:
        """Whether the title alone does not say what each curve is."""
        has_colors = len({curve.color for curve in self.curves}) > 1
        return has_colors or any(curve.look == "dots" for curve in self.curves)

    @property
    def has_bars(self) -> bool:
        return any(curve.look == "bars" for curve in self.curves)

    @property
    def x_axis(self) -> Axis:
        xs = [x for curve in self.curves for x, _ in curve.points]
        if not self.counts:
            return time_axis([*xs, *self.span])
        return step_axis([*xs, *self.non_finite_steps, *self.span], bars=self.has_bars)

    @property
    def y_axis(self) -> Axis:
        ys = [y for curve in self.curves for _, y in curve.points if not math.isnan(y)]
        return value_axis(ys, self.from_zero, self.top)


@cached_on_record
def training_panels(record: RunRecord) -> list[Panel]:
    """Return the panels of the training that have data, in reading order."""
    names = ["loss", *metric_names(record)[:MAX_METRICS]]
    panels = [
        *(_score_panel(record, name) for name in names),
        _epoch_time_panel(record),
        _gradient_norm_panel(record),
        _learning_rate_panel(record),
        _throughput_panel(record),
    ]
    return _with_data(record, panels)


def device_panels(record: RunRecord) -> list[Panel]:
    """Return the panels of the monitored devices and the host that have data."""
    utilization = _device_curves(record, "utilization", 1)
    cpu = _host_curves(record, "host cpu", "cpu_percent", 1)
    gpu_memory = _device_curves(record, "memory_used", GIB)
    process_memory = _host_curves(record, "process", "process_memory", GIB)
    power = _device_curves(record, "power", 1)
    panels = [
        Panel("Utilization", (*utilization, *cpu), "%", from_zero=True, top=100.0),
        Panel("Memory in use", (*gpu_memory, *process_memory), "GiB", from_zero=True),
        Panel("Power", tuple(power), "W", from_zero=True),
    ]
    return _with_data(record, panels)


def smooth(points: Points) -> Points:
    """Return an exponential mean over about a thirtieth of the series, without bias at its start."""
    # Dividing by the summed weights removes the bias towards the initial zero.
    keep = 1 - 2 / (max(1.0, len(points) / 30) + 1)
    mean = 0.0
    weight = 0.0
    smoothed = []
    for x, y in points:
        if not math.isnan(y):
            mean = keep * mean + (1 - keep) * y
            weight = keep * weight + (1 - keep)
        smoothed.append((x, y if math.isnan(y) else mean / weight))
    return smoothed


def decimate(points: Points, limit: int = MAX_POINTS) -> Points:
    """Return about ``limit`` points that look the same: the extremes of each bucket, so no spike is lost."""
    if len(points) <= limit:
        return points
    # Two points per bucket, and the two ends.
    num_buckets = limit // 2 - 1
    edges = [index * len(points) // num_buckets for index in range(num_buckets + 1)]
    chosen = {0, len(points) - 1}
    for start, end in pairwise(edges):
        chosen |= _visible_points(points, range(start, end))
    return [points[index] for index in sorted(chosen)]


def _visible_points(points: Points, bucket: range) -> set[int]:
    """Return the points of a bucket that must stay: its extremes, and a gap."""
    gaps = [index for index in bucket if math.isnan(points[index][1])]
    known = [index for index in bucket if not math.isnan(points[index][1])]
    if not known:
        return set(gaps[:1])
    lowest = min(known, key=lambda index: points[index][1])
    highest = max(known, key=lambda index: points[index][1])
    return {lowest, highest, *gaps[:1]}


def _with_data(record: RunRecord, panels: Iterable[Panel]) -> list[Panel]:
    """Return the panels that have data, without empty curves, and with the same steps on every x axis."""
    span = tuple(float(event.step) for event in (*record.steps[:1], *record.steps[-1:]))
    filled = []
    for panel in panels:
        curves = tuple(curve for curve in panel.curves if _has_number(curve))
        filled.append(replace(panel, curves=curves, span=span if panel.x_label == "step" else ()))
    return [panel for panel in filled if panel.curves or panel.non_finite_steps]


def _has_number(curve: PanelCurve) -> bool:
    return any(not math.isnan(y) for _, y in curve.points)


def rates(steps: Iterable[Step], field: str) -> list[tuple[Step, float]]:
    """Return the steps that have a time, each with a figure per second."""
    return [(step, (getattr(step, field) or 0.0) / step.seconds) for step in steps if step.seconds]


def numbered_points(pairs: Iterable[tuple[float, float | None]]) -> Points:
    """Return the pairs that have a number; one that no axis can show becomes a gap."""
    known = ((float(x), y) for x, y in pairs if y is not None)
    return [(x, y if abs(y) < MAX_VALUE else math.nan) for x, y in known]


def _smoothed_curves(label: str, points: Points, color: int = 0) -> tuple[PanelCurve, ...]:
    """Return a noisy series twice: pale as it is, and strong as a running mean."""
    if len(points) < SMOOTH_FROM:
        return (PanelCurve(label, points, "line", color),)
    return (
        PanelCurve(f"{label}, each step", decimate(points), "raw", color),
        PanelCurve(label, decimate(smooth(points)), "line", color),
    )


def _score_panel(record: RunRecord, name: str) -> Panel:
    """Return the loss or a metric, in training and in evaluation."""
    train = numbered_points((event.step, score(event, name)) for event in record.steps)
    validation = numbered_points((event.step, score(event, name)) for event in record.evaluations)
    curves = (
        *_smoothed_curves("train", train),
        PanelCurve("validation", decimate(validation, MAX_DOTS), "dots", 1),
    )
    panel = Panel(name.replace("_", " ").capitalize(), curves, weights=_weights(record) if validation else ())
    if name != "loss":
        return panel
    return replace(panel, marks=_marks(record), non_finite_steps=_non_finite_steps(record, "loss"))


def _weights(record: RunRecord) -> tuple[tuple[float, str], ...]:
    """Return the step whose weights were kept, and the best one where it is another; kept ones come first."""
    kept = record.final.step if record.final is not None else None
    best = best_evaluation(record)
    found = [] if kept is None else [(float(kept), f"kept: step {kept}")]
    if best is not None and best.step != kept:
        so_far = " so far" if kept is None else ""
        found.append((float(best.step), f"best{so_far}: step {best.step}"))
    return tuple(found)


def _marks(record: RunRecord) -> tuple[tuple[float, str], ...]:
    """Return the steps of resumes, recoveries and out-of-memory errors, which may explain a jump
    in the curve."""
    marked = [event for event in record.events if isinstance(event, Resume | Recovery | OutOfMemory)]
    # A recovery reads a checkpoint, and both events have the same step: one mark is enough.
    by_step = {event.step: (float(event.step), event.EVENT) for event in marked if event.step is not None}
    return tuple(by_step.values())[:MAX_MARKS]


def _non_finite_steps(record: RunRecord, name: str) -> tuple[float, ...]:
    values = [(float(event.step), getattr(event, name)) for event in record.steps]
    steps = [step for step, value in values if value is not None and not abs(value) < MAX_VALUE]
    stride = -(-len(steps) // MAX_DOTS) or 1
    return tuple(steps[::stride])


def _epoch_time_panel(record: RunRecord) -> Panel:
    points = numbered_points((event.epoch + 1, event.seconds) for event in record.epochs)
    look: Look = "bars" if len(points) <= MAX_BARS else "line"
    curve = PanelCurve("epoch time", decimate(points), look, 2)
    return Panel("Epoch time", (curve,), "s", x_label="epoch", from_zero=True)


def _gradient_norm_panel(record: RunRecord) -> Panel:
    points = numbered_points((event.step, event.grad_norm) for event in record.steps)
    curves = _smoothed_curves("gradient norm", points, 3)
    return Panel("Gradient norm", curves, non_finite_steps=_non_finite_steps(record, "grad_norm"))


def _learning_rate_panel(record: RunRecord) -> Panel:
    points = numbered_points((event.step, event.lr) for event in record.steps)
    return Panel("Learning rate", (PanelCurve("learning rate", decimate(points), "line", 4),), from_zero=True)


def _throughput_panel(record: RunRecord) -> Panel:
    """Return units (tokens) per second if a sample has several, else samples per second."""
    has_units = any(event.units not in (None, event.samples) for event in record.steps if event.seconds)
    field, unit = ("units", f"{unit_name(record)}/s") if has_units else ("samples", "samples/s")
    points = numbered_points((event.step, rate) for event, rate in rates(record.steps, field))
    return Panel("Throughput", _smoothed_curves("throughput", points, 5), unit, from_zero=True)


def _host_curves(record: RunRecord, label: str, name: str, unit: float) -> tuple[PanelCurve, ...]:
    points = numbered_points((event.step, getattr(event.host, name)) for event in record.monitors)
    return _smoothed_curves(label, [(x, y / unit) for x, y in points], color=HOST_COLOR)


def _device_curves(record: RunRecord, name: str, unit: float) -> list[PanelCurve]:
    series: dict[str, Points] = {}
    for event in record.monitors:
        for device in event.devices:
            value = getattr(device, name)
            if value is not None:
                series.setdefault(f"gpu {device.index}", []).append((float(event.step), value / unit))
    curves: list[PanelCurve] = []
    for index, (label, points) in enumerate(sorted(series.items())):
        curves += _smoothed_curves(label, points, GPU_COLORS[index % len(GPU_COLORS)])
    return curves
