"""The results of runs as figures: name, direction, and the value of each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.config.metric import Mode, known_mode
from orchestrator.record.events.decoding import finite
from orchestrator.record.events.kinds import Evaluation
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.run.figures import stats
from orchestrator.report.run.figures.outcome import score_text
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.types import bytes_text, seconds_text, speed_text

MAX_METRICS = 8
_FAR_SHARE = 0.25
"""A loss is far behind if it lacks this part of what the best one fell by, and exceeds it by this part."""
_EQUAL_SHARE = 0.0005
"""Of a value: a smaller difference is shown as 0.0 %."""


@dataclass(frozen=True)
class Figure:
    """A result of each run, in the order of the runs."""

    name: str
    values: tuple[float | None, ...]
    mode: Mode | None
    """Which values are better; None if unknown, or if neither is."""
    text_of: Callable[[float], str]
    is_quality: bool = False
    """Whether it measures what was learnt. Repeats with one seed say nothing about its noise."""
    beginning: float | None = None
    """The training loss before anything was learnt, of a validation loss."""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple("–" if value is None else self.text_of(value) for value in self.values)

    @property
    def best(self) -> float | None:
        known = [value for value in self.values if value is not None]
        if self.mode is None or len(known) < 2 or self.are_equal(min(known), max(known)):
            return None
        return min(known) if self.mode == "min" else max(known)

    def are_equal(self, one: float, other: float) -> bool:
        """Whether two values are equal as they are shown. One that is shown coarsely must be near, too."""
        is_near = abs(one - other) < _EQUAL_SHARE * max(abs(one), abs(other))
        return one == other or (is_near and self.text_of(one) == self.text_of(other))

    def is_far(self, best: float, other: float) -> bool:
        """Whether a loss is so far behind that nobody needs seeds to see it."""
        if self.beginning is None:
            return False
        lost = other - best
        return lost >= _FAR_SHARE * (self.beginning - best) and lost >= _FAR_SHARE * abs(other)


def figures(runs: Sequence[ComparedRun]) -> list[Figure]:
    """Return the results that at least one run has."""
    found = [*_quality_figures(runs), *_speed_figures(runs), *_course_figures(runs)]
    return [figure for figure in found if any(value is not None for value in figure.values)]


def common_evaluation_step(runs: Sequence[ComparedRun]) -> int | None:
    """Return the last step that every run has evaluated; None if there is none."""
    steps = [{event.step for event in run.record.evaluations} for run in runs]
    return max(set.intersection(*steps), default=None)


def evaluations_compared(runs: Sequence[ComparedRun]) -> tuple[str, list[Evaluation | None]]:
    """Return the evaluation of each run by which the runs are judged, and what it is of.

    Of complete runs it is that of their final weights. If a run goes on or was stopped, all are
    judged at the last step that every run has evaluated.
    """
    step = common_evaluation_step(runs)
    if step is None or all(run.is_complete for run in runs):
        return "final weights", [stats.final_evaluation(run.record) for run in runs]
    chosen = [next((event for event in run.record.evaluations if event.step == step), None) for run in runs]
    return f"step {step}", list(chosen)


def _quality_figures(runs: Sequence[ComparedRun]) -> list[Figure]:
    _, evaluations = evaluations_compared(runs)
    names = dict.fromkeys(name for run in runs for name in stats.metric_names(run.record)[:MAX_METRICS])
    found = []
    for name in ("loss", *names):
        scores = tuple(stats.score_number(event, name) if event else None for event in evaluations)
        mode = _mode(runs, name)
        beginning = _beginning(runs) if name == "loss" else None
        label = f"validation {name.replace('_', ' ')}"
        found.append(Figure(label, scores, mode, score_text, True, beginning))
    last = tuple(finite(run.record.steps[-1].loss) if run.record.steps else None for run in runs)
    return [*found, Figure("train loss, last step", last, None, score_text, True)]


def _beginning(runs: Sequence[ComparedRun]) -> float | None:
    """Return the highest loss of a run's first step."""
    return max((loss for run in runs for loss in stats.values(run.record.steps[:1], "loss")), default=None)


def _mode(runs: Sequence[ComparedRun], name: str) -> Mode | None:
    """Return the direction of a metric: the one that the runs were judged by, else that of its name."""
    for run in runs:
        criterion = stats.watched_criterion(run.record)
        if criterion.name == name:
            return criterion.mode
    return known_mode(name)


def _speed_figures(runs: Sequence[ComparedRun]) -> list[Figure]:
    speeds = [stats.speed(run.record) for run in runs]
    samples = tuple(measured.samples if measured else None for measured in speeds)
    units = tuple(measured.units if measured else None for measured in speeds)
    medians = tuple(measured.median_step_s if measured else None for measured in speeds)
    peaks = [stats.memory(run.record) for run in runs]
    allocated = tuple(peak.allocated if peak else None for peak in peaks)
    found = [Figure("samples/s", samples, "max", speed_text)]
    if units != samples:
        found.append(Figure(f"{stats.unit_name(runs[0].record)}/s", units, "max", speed_text))
    return [
        *found,
        Figure("median step", medians, None, seconds_text),
        Figure("peak memory", allocated, "min", bytes_text),
    ]


def _course_figures(runs: Sequence[ComparedRun]) -> list[Figure]:
    def of_each(value: Callable[[RunRecord], float | None]) -> tuple[float | None, ...]:
        return tuple(value(run.record) for run in runs)

    steps = tuple(float(run.last_step) for run in runs)
    return [
        Figure("steps", steps, None, _whole_text),
        Figure("time", of_each(lambda record: record.seconds), None, seconds_text),
        Figure("resumes", of_each(lambda record: float(len(record.resumes))), None, _whole_text),
        Figure("recoveries", of_each(lambda record: float(len(record.recoveries))), None, _whole_text),
        Figure("steps repeated", of_each(_repeated_steps), None, _whole_text),
        Figure("goodput", of_each(lambda record: finite(record.summary.get("goodput"))), None, _percent_text),
    ]


def _repeated_steps(record: RunRecord) -> float:
    return float(max(record.replayed_steps, round(sum(stats.values(record.recoveries, "lost_steps")))))


def _whole_text(value: float) -> str:
    return f"{value:.0f}"


def _percent_text(value: float) -> str:
    return f"{value:.1%}"
