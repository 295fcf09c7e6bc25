"""The curves of all runs on common axes: by step, and by time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.record.events.kinds import Evaluation, Step, StepEvent
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.run.figures.panels import (
    MAX_DOTS,
    SMOOTH_FROM,
    Panel,
    PanelCurve,
    Points,
    decimate,
    numbered_points,
    rates,
    smooth,
)
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.figures.stats import metric_names, score, unit_name

MAX_METRICS = 6
TIME_UNITS = ((3 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"), (0.0, 1.0, "s"))
"""From which duration in seconds on an axis of time has a unit, the seconds of the unit, its name."""

Place = Callable[[StepEvent], float]
"""The x of an event."""
Values = Sequence[tuple[StepEvent, float | None]]
"""Events, each with its value."""


def panels_by_step(runs: Sequence[ComparedRun]) -> list[Panel]:
    return _Curves(runs, [_step for _ in runs], "step").panels()


def panels_by_time(runs: Sequence[ComparedRun]) -> list[Panel]:
    """Return the curves over the time since the start, without the pauses between sessions."""
    longest_s = max((run.record.seconds or 0.0 for run in runs), default=0.0)
    unit_s, unit = next((unit_s, unit) for least_s, unit_s, unit in TIME_UNITS if longest_s >= least_s)
    places = [_time_place(run.record, unit_s) for run in runs]
    return _Curves(runs, places, f"time, {unit}", counts=False).panels()


def _step(event: StepEvent) -> float:
    return float(event.step)


def _time_place(record: RunRecord, unit_s: float) -> Place:
    """Return a function from an event to its time since the start, in units."""
    begins: list[tuple[float, float]] = []
    elapsed = 0.0
    for session in record.sessions:
        times = [event.time for event in session if event.time is not None]
        if times:
            # The pause before a session is left out: its times begin where the last one ended.
            begins.append((min(times), elapsed))
            elapsed += max(times) - min(times)

    def place(event: StepEvent) -> float:
        time = event.time
        known = [(begin, offset) for begin, offset in begins if time is not None and begin <= time]
        if time is None or not known:
            return math.nan
        begin, offset = known[-1]
        return (time - begin + offset) / unit_s

    return place


@dataclass(frozen=True)
class _Curves:
    """The curves of all runs over one kind of x."""

    runs: Sequence[ComparedRun]
    places: Sequence[Place]
    """The x of an event, for each run."""
    x_label: str
    counts: bool = True
    """Whether x is a whole number."""

    def panels(self) -> list[Panel]:
        names = dict.fromkeys(name for run in self.runs for name in metric_names(run.record))
        found = [
            self._panel("Training loss", "", lambda record: _scores(record.steps, "loss")),
            *(self._validation_panel(name) for name in ("loss", *list(names)[:MAX_METRICS])),
            self._throughput_panel(),
        ]
        places = [x for panel in found for curve in panel.curves for x, _ in curve.points]
        ends = (min(places), max(places)) if places else ()
        return [replace(panel, span=ends) for panel in found if any(curve.points for curve in panel.curves)]

    def _panel(self, title: str, unit: str, values_of: Callable[[RunRecord], Values]) -> Panel:
        """Return a panel of values of every step, as running means."""
        curves = []
        is_smooth = False
        for color, (run, place) in enumerate(zip(self.runs, self.places, strict=True)):
            points = _points(values_of(run.record), place)
            if len(points) >= SMOOTH_FROM:
                points = smooth(points)
                is_smooth = True
            curves.append(PanelCurve(run.label, decimate(points), "line", color))
        texts = (unit, "running mean" if is_smooth else "")
        shown_unit = ", ".join(text for text in texts if text)
        return Panel(title, tuple(curves), shown_unit, self.x_label, self.counts, bool(unit))

    def _validation_panel(self, name: str) -> Panel:
        curves = []
        for color, (run, place) in enumerate(zip(self.runs, self.places, strict=True)):
            points = _points(_scores(run.record.evaluations, name), place)
            curves.append(PanelCurve(run.label, decimate(points, MAX_DOTS), "dots", color))
        title = f"Validation {name.replace('_', ' ')}"
        return Panel(title, tuple(curves), x_label=self.x_label, counts=self.counts)

    def _throughput_panel(self) -> Panel:
        """Return units (tokens) per second if a sample has several, else samples per second."""
        last_steps = [event for run in self.runs for event in run.record.steps[-1:]]
        has_units = any(event.units not in (None, event.samples) for event in last_steps)
        field = "units" if has_units else "samples"
        unit = unit_name(self.runs[0].record) if has_units else "samples"
        return self._panel("Throughput", f"{unit}/s", lambda record: rates(record.steps, field))


def _points(values: Values, place: Place) -> Points:
    known = numbered_points((place(event), value) for event, value in values)
    return [(x, y) for x, y in known if not math.isnan(x)]


def _scores(events: Sequence[Step | Evaluation], name: str) -> Values:
    return [(event, score(event, name)) for event in events]
