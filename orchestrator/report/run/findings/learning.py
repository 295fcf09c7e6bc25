"""The verdict on learning, from the losses of a run alone.

The run diverged, it overfits, its validation loss rises, its loss does not fall, was still falling at the
end, or has levelled off; or the record is too short or too noisy to say. Only changes beyond the noise count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, stdev

from orchestrator.config.metric import Criterion
from orchestrator.record.events.decoding import finite
from orchestrator.record.events.kinds import Evaluation
from orchestrator.record.summary.totals import NUM_FIRST
from orchestrator.report.run.figures import stats
from orchestrator.report.run.figures.outcome import score_text
from orchestrator.report.run.figures.panels import Points
from orchestrator.report.run.figures.read import RunRecord, cached_on_record
from orchestrator.report.run.figures.trend import NUM_WINDOWS, Trend, noise, trend, window_means
from orchestrator.report.run.findings.finding import Finding
from orchestrator.report.run.findings.learning_advice import (
    divergence_advice,
    evaluation_advice,
    learning_rate_name,
    levelled_advice,
    longer_advice,
    overfitting_advice,
    shorter_advice,
)
from orchestrator.types import counted

MIN_STEPS = 2 * NUM_WINDOWS
MIN_EVALUATIONS = 5
MIN_LATER = 2
"""Evaluations after the best one: a single worse result may be chance."""
MIN_RISE = {"loss": 0.05}
"""The part of its best value by which a metric must have become worse."""
MIN_RISE_OF_OTHERS = 0.005
NOISE_FACTOR = 2.5
"""A change must also exceed this multiple of the noise between neighbouring evaluations."""
MIN_TRAINING_FALL = 0.05
"""The part by which the training loss must have fallen while the validation became worse."""
MIN_FALL = 0.02
"""The part of a loss by which it must fall over the later half to count as falling."""
MAX_MARGIN = 0.15
"""A loss has levelled off if a fall by this part would have been seen."""
MIN_DIVERGENCE = 0.25
"""The part of its lowest mean by which the training loss must exceed it at the end, and half of its fall."""


@dataclass(frozen=True)
class _Decline:
    """A validation metric that became worse after its best value."""

    best: Evaluation
    text: str


@cached_on_record
def learning_finding(record: RunRecord) -> Finding:
    """Return whether and how the model learnt, the numbers that show it, and things to try."""
    judgements: tuple[Callable[[RunRecord], Finding | None], ...] = (
        _diverged,
        _too_short,
        _worse_validation,
        _not_learning,
    )
    found = (finding for judge in judgements if (finding := judge(record)) is not None)
    return next(found, None) or _course(record)


def _diverged(record: RunRecord) -> Finding | None:
    """Return that the training loss is no number at the end, or has lost half of its fall."""
    advice = divergence_advice(record)
    last = record.steps[-1].loss if record.steps else None
    if last is not None and not math.isfinite(last):
        return Finding("diverged", (f"nan or infinite: {stats.non_finite_text(record)}",), advice)
    means = window_means(_training_points(record))
    if len(means) < NUM_WINDOWS:
        return None
    lowest_step, lowest = min(means, key=lambda point: point[1])
    end = median(loss for _, loss in means[-2:])
    fall = _beginning(record) - lowest
    least = max(0.5 * fall, MIN_DIVERGENCE * abs(lowest), NOISE_FACTOR * noise([loss for _, loss in means]))
    if end - lowest <= least:
        return None
    evidence = (
        f"the training loss was lowest at step {lowest_step:.0f} ({score_text(lowest)}) "
        f"and {score_text(end)} at the end (means of {counted(len(means), 'part')} of the run)"
    )
    return Finding("diverged", (evidence,), advice)


def _too_short(record: RunRecord) -> Finding | None:
    num_steps = len(_training_points(record))
    num_evaluations = len(_validation_points(record))
    if num_steps >= MIN_STEPS or num_evaluations >= MIN_EVALUATIONS:
        return None
    steps = counted(num_steps, "step")
    evaluations = counted(num_evaluations, "evaluation")
    return Finding(
        "too short",
        (
            f"{steps} and {evaluations} recorded; "
            f"a verdict needs {MIN_STEPS} steps or {MIN_EVALUATIONS} evaluations",
        ),
        (longer_advice(record),),
    )


def _worse_validation(record: RunRecord) -> Finding | None:
    """Return that the validation became worse: overfitting if the training loss fell meanwhile."""
    criteria = dict.fromkeys((stats.watched_criterion(record), Criterion("loss", "min")))
    declines = [decline for criterion in criteria if (decline := _decline(record, criterion)) is not None]
    declines = declines or [decline for decline in (_rise(record),) if decline is not None]
    if not declines:
        return None
    best = declines[0].best
    losses = _training_losses(record, best.step)
    if losses is None:
        return None
    evidence = tuple(decline.text for decline in declines)
    course = f"from {score_text(losses[0])} to {score_text(losses[1])} meanwhile"
    if losses[1] <= (1 - MIN_TRAINING_FALL) * losses[0]:
        fell = f"the training loss fell {course}"
        return Finding("overfitting", (*evidence, fell), overfitting_advice(record, best))
    went = f"the training loss went {course}: not the mark of overfitting"
    return Finding(
        "rising", (*evidence, went), (f"a lower {learning_rate_name(record)}", shorter_advice(record, best))
    )


def _decline(record: RunRecord, criterion: Criterion) -> _Decline | None:
    """Return how far a metric became worse after its best value; None if that may be noise."""
    known = [event for event in record.evaluations if stats.score_number(event, criterion.name) is not None]
    # Larger is better here, whatever the metric.
    scores = [criterion.score(stats.score_number(event, criterion.name) or 0.0) for event in known]
    if len(scores) < MIN_EVALUATIONS:
        return None
    best_index = max(range(len(scores)), key=scores.__getitem__)
    later = scores[best_index + 1 :]
    if len(later) < MIN_LATER:
        return None
    best = scores[best_index]
    # The best of many noisy values is partly chance: its neighbours say where the model was.
    fall = median(scores[max(0, best_index - 1) : best_index + 2]) - median(later)
    least = MIN_RISE.get(criterion.name, MIN_RISE_OF_OTHERS) * abs(best)
    if fall < max(least, NOISE_FACTOR * noise(scores)):
        return None
    best_value = stats.score_number(known[best_index], criterion.name) or 0.0
    now = median(later) if best_value == best else -median(later)
    change = abs(now - best_value) / max(1e-12, abs(best_value))
    verb = "rose" if now > best_value else "fell"
    times = counted(len(later), "evaluation")
    text = (
        f"validation {criterion.name} was best at step {known[best_index].step} "
        f"({score_text(best_value)}), "
        f"then {verb} by {change:.1%} (to {score_text(now)}, the median of {times})"
    )
    return _Decline(known[best_index], text)


def _rise(record: RunRecord) -> _Decline | None:
    """Return a validation loss that rises steadily to the end, although an early one was lower by chance."""
    points = _validation_points(record)
    course = trend(points, points[0][1]) if len(points) >= MIN_EVALUATIONS else None
    best = stats.best_evaluation(record)
    if course is None or best is None or -course.fall - course.margin < MIN_RISE["loss"]:
        return None
    return _Decline(best, f"{_course_text('validation loss', course, True)}; {_best_text(record)[0]}")


def _training_losses(record: RunRecord, best_step: int) -> tuple[float, float] | None:
    """Return the mean training loss of the steps before the best evaluation, and of as many at the end."""
    steps = [event.step for event in record.evaluations]
    before = max((step for step in steps if step < best_step), default=0)
    until_best = stats.values((e for e in record.steps if before < e.step <= best_step), "loss")
    end = record.steps[-1].step if record.steps else 0
    last = stats.values((e for e in record.steps if e.step > end - max(1, best_step - before)), "loss")
    return (fmean(until_best), fmean(last)) if until_best and last else None


def _not_learning(record: RunRecord) -> Finding | None:
    """Return that the training loss is where it began."""
    points = _training_points(record)
    if len(points) < MIN_STEPS:
        return None
    first = _first_losses(record)
    means = window_means(points)
    end = means[-1][1]
    fall = fmean(first) - end
    # A model that learns within few steps shows no trend; one that learns slowly shows it over the run.
    course = trend(means, fmean(first))
    is_falling = course is not None and course.fall > max(MIN_FALL, course.margin)
    least = max(MIN_FALL * abs(fmean(first)), NOISE_FACTOR * stdev(first) / NUM_FIRST**0.5)
    if is_falling or fall > least or _validation_improved(record):
        return None
    return Finding(
        "not learning",
        (f"the training loss began at {score_text(fmean(first))} and ended at {score_text(end)}",),
        (
            f"another {learning_rate_name(record)}: ten times higher, and ten times lower",
            "see that inputs and targets belong together: a model that learns fits ten samples in 100 steps",
        ),
    )


def _validation_improved(record: RunRecord) -> bool:
    losses = [loss for _, loss in _validation_points(record)]
    if len(losses) < MIN_EVALUATIONS:
        return False
    fall = losses[0] - median(losses[-MIN_LATER:])
    return fall > max(MIN_FALL * abs(losses[0]), NOISE_FACTOR * noise(losses))


def _course(record: RunRecord) -> Finding:
    """Return whether the loss was falling at the end: that of the validation, if it was evaluated often."""
    validation = _validation_points(record)
    by_validation = len(validation) >= MIN_EVALUATIONS
    training = trend(window_means(_training_points(record)), _beginning(record))
    course = trend(validation, max(_beginning(record), validation[0][1])) if by_validation else training
    assert course is not None, "a record that is not too short has a trend"
    name = "validation loss" if by_validation else "training loss"
    evidence = [_course_text(name, course, by_validation)]
    if not by_validation:
        found = counted(len(validation), "evaluation")
        evidence.append(f"{found}: overfitting shows from {MIN_EVALUATIONS} on")
    if course.fall > max(MIN_FALL, course.margin):
        return Finding("still falling", tuple(evidence), (longer_advice(record),))
    if course.margin > MAX_MARGIN:
        return Finding(
            "no trend", (*evidence, *_best_text(record)), (evaluation_advice(record, by_validation),)
        )
    is_fitting = by_validation and training is not None and training.fall > max(MIN_FALL, training.margin)
    if is_fitting and training is not None:
        evidence.append(
            f"the training loss still fell, by {training.fall:.0%}, to {score_text(training.end)}"
        )
    beginning = _beginning(record)
    fall = (beginning - training.end) / (abs(beginning) or 1.0) if training is not None else 1.0
    return Finding("levelled off", tuple(evidence), levelled_advice(record, is_fitting, fall))


def _course_text(name: str, course: Trend, by_validation: bool) -> str:
    verb = "fell" if course.fall >= 0 else "rose"
    over = f"the last {course.num_points} evaluations" if by_validation else "the second half of the run"
    change = f"{verb} by {abs(course.fall):.0%} (± {course.margin:.0%})"
    return f"{name} {change} over {over}, to {score_text(course.end)}"


def _best_text(record: RunRecord) -> tuple[str, ...]:
    best = stats.best_evaluation(record)
    if best is None:
        return ()
    name = stats.watched_criterion(record).name
    value = score_text(stats.score_number(best, name))
    return (f"validation {name} was best at step {best.step} ({value})",)


@cached_on_record
def _training_points(record: RunRecord) -> Points:
    known = [(float(event.step), finite(event.loss)) for event in record.steps]
    return [(step, loss) for step, loss in known if loss is not None]


def _validation_points(record: RunRecord) -> Points:
    known = [(float(event.step), stats.score_number(event, "loss")) for event in record.evaluations]
    return [(step, loss) for step, loss in known if loss is not None]


def _beginning(record: RunRecord) -> float:
    """Return the training loss of the first steps."""
    return fmean(_first_losses(record) or [0.0])


def _first_losses(record: RunRecord) -> list[float]:
    """Return the losses of the first steps; a record without sums has all of them among its points."""
    if len(record.totals.first_losses) >= 2:
        return record.totals.first_losses
    return [loss for _, loss in _training_points(record)[:NUM_FIRST]]
