"""Drawings of the scaling in a sweep, for its page and its image file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.draw.axes import Axis, log_axis
from orchestrator.report.draw.marks import Plot
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.run.figures.panels import Panel, PanelCurve, Points
from orchestrator.report.run.panel_plot import panel_plot
from orchestrator.report.sweep.facts import series_label
from orchestrator.report.sweep.scaling import Kind, ScalingSeries, series_of

MAX_SERIES = 6
LEFT_MARGIN = 0.08
"""Part of the axis before the first mark: the name of the axis is written below it."""
LOG_DEVICES = 4
"""From this ratio of the largest to the smallest number of devices on, axes are logarithmic."""
LEFT_RATIO = 1.25
"""Margin of a logarithmic axis before the first mark."""
SPEED_UNIT = "samples/s"
_IDEAL_COLOR = 5
_KINDS: tuple[tuple[Kind, str, str], ...] = (
    ("strong", "Strong scaling", "the global batch stays"),
    ("weak", "Weak scaling", "each device keeps its batch"),
)


class DevicePanel(Panel):
    """A panel whose x axis is marked at the measured numbers of devices."""

    @property
    def x_axis(self) -> Axis:
        counts = sorted({x for curve in self.curves for x, _ in curve.points})
        low = counts[0]
        high = counts[-1]
        if self._is_log:
            return Axis(low / LEFT_RATIO, high, True, tuple(counts))
        return Axis(low - LEFT_MARGIN * (high - low), high, False, tuple(counts))

    @property
    def y_axis(self) -> Axis:
        """If both axes are logarithmic, the ideal lines are straight."""
        if not (self._is_log and self.unit == SPEED_UNIT):
            return super().y_axis
        return log_axis([y for curve in self.curves for _, y in curve.points if y > 0])

    @property
    def _is_log(self) -> bool:
        counts = [x for curve in self.curves for x, _ in curve.points]
        return max(counts) >= LOG_DEVICES * min(counts)


def scaling_plots(record: SweepRecord) -> list[Plot]:
    """Return throughput and efficiency over the devices, strong and weak apart; faint lines are the ideal."""
    plots = []
    for kind, name, explanation in _KINDS:
        shown = series_of(record, kind)[:MAX_SERIES]
        if shown:
            plots.append(panel_plot(_speed_panel(f"{name}: throughput", shown)))
            plots.append(panel_plot(_efficiency_panel(f"{name}: efficiency", explanation, shown)))
    return plots


def _speed_panel(title: str, shown: Sequence[ScalingSeries]) -> Panel:
    curves = []
    for color, series in enumerate(shown):
        label = series_label(series, shown)
        rates = series.points["samples_per_second"]
        first = rates.iloc[0] / series.base_devices
        ideal = [(float(count), first * count) for count in series.points["devices"]]
        curves.append(PanelCurve("ideal", ideal, "raw", color))
        curves += _measured_curves(label, series, rates, rates * series.points["interval"], color)
    return DevicePanel(title, tuple(curves), SPEED_UNIT, "devices", from_zero=True)


def _efficiency_panel(title: str, explanation: str, shown: Sequence[ScalingSeries]) -> Panel:
    first = float(min(series.base_devices for series in shown))
    last = float(max(series.max_devices for series in shown))
    curves = [PanelCurve("ideal", [(first, 100.0), (last, 100.0)], "raw", _IDEAL_COLOR)]
    for color, series in enumerate(shown):
        label = series_label(series, shown)
        percents = 100 * series.points["efficiency"]
        errors = 100 * series.points["efficiency_interval"]
        curves += _measured_curves(label, series, percents, errors, color)
    return DevicePanel(title, tuple(curves), f"%, {explanation}", "devices", from_zero=True)


def _measured_curves(
    label: str, series: ScalingSeries, values: Frame, errors: Frame, color: int
) -> list[PanelCurve]:
    """Return a vertical line for each point, as long as its interval, and above it the measured points."""
    measured = []
    bars: Points = []
    known = zip(series.points["devices"], values, errors.fillna(0.0), strict=True)
    for count, value, error in known:
        x = float(count)
        measured.append((x, float(value)))
        # nan separates the lines.
        bars += [(x, value - error), (x, value + error), (x, math.nan)]
    return [PanelCurve(label, bars, "raw", color), PanelCurve(label, measured, "dots", color)]
