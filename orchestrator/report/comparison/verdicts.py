"""Which settings are better, and whether the difference exceeds the noise of repeated runs.

Runs that differ in nothing but their seed form a group. The spread within the groups is the noise;
all groups share one estimate of it, so that a group of one run can be judged too. The difference of
two groups counts if it exceeds the 95 % interval of Student's t, divided among all pairs of groups
(Bonferroni): the best of many settings looks good by chance as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from orchestrator.report.comparison.figures import Figure
from orchestrator.report.comparison.runs import SEED, ComparedRun
from orchestrator.report.run.figures.stats import device_name
from orchestrator.types import counted

CONFIDENCE = 0.95
Outcome = Literal["better", "within noise", "far ahead", "ahead", "equal", "one setting"]
"""``far ahead`` and ``ahead`` without a word about noise: no setting was repeated, so that it is unknown."""
_FACTOR = 2.0
"""Values whose ratio exceeds this are compared by it, others in per cent."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed, by their places in the comparison."""

    label: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """The judgement of one figure."""

    figure: str
    outcome: Outcome
    best: str
    """The label of the best group; empty if there is none."""
    text: str


@dataclass(frozen=True)
class _Sample:
    """The values of a figure in one group: of quality one for each seed, else one for each run."""

    label: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def squares(self) -> float:
        return sum((value - self.mean) ** 2 for value in self.values)


def groups(runs: Sequence[ComparedRun]) -> list[Group]:
    """Return the groups in order of appearance. Other hardware or workers make another group."""
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        settings = {name: value for name, value in run.settings.items() if name != SEED}
        key = json.dumps([settings, device_name(run.record), run.record.workers], default=str, sort_keys=True)
        places.setdefault(key, []).append(place)
    return [Group(_group_label(runs, members), tuple(members)) for members in places.values()]


def _group_label(runs: Sequence[ComparedRun], places: Sequence[int]) -> str:
    first = runs[places[0]].label
    return first if len(places) == 1 else f"{first} ({len(places)} runs)"


def verdicts(runs: Sequence[ComparedRun], shown: Sequence[Figure]) -> list[Verdict]:
    """Return a verdict for each figure that has a direction and a value in two groups."""
    members = groups(runs)
    judged = [_verdict(figure, _samples(runs, members, figure)) for figure in shown if figure.mode]
    return [verdict for verdict in judged if verdict is not None]


def _samples(runs: Sequence[ComparedRun], members: Sequence[Group], figure: Figure) -> list[_Sample]:
    samples = []
    for group in members:
        by_repeat: dict[str, list[float]] = {}
        for place in group.places:
            value = figure.values[place]
            if value is not None:
                # One seed again is no second result: only its speed varies by itself.
                repeat = str(runs[place].seed) if figure.is_quality else str(place)
                by_repeat.setdefault(repeat, []).append(value)
        if by_repeat:
            samples.append(_Sample(group.label, tuple(map(fmean, by_repeat.values()))))
    return samples


def _verdict(figure: Figure, samples: Sequence[_Sample]) -> Verdict | None:
    if len(samples) < 2:
        return _verdict_of_one(figure, samples[0]) if samples else None
    sign = -1 if figure.mode == "min" else 1
    best, *others = sorted(samples, key=lambda sample: sign * sample.mean, reverse=True)
    if figure.are_equal(best.mean, others[-1].mean):
        return Verdict(figure.name, "equal", "", f"equal in all runs: {figure.text_of(best.mean)}")
    noise = _noise(samples)
    margins = {sample.label: _margin(noise, best, sample, len(samples)) for sample in others}
    found = _comparison_text(figure, best, others)
    if noise is None:
        outcome = "far ahead" if figure.is_far(best.mean, others[0].mean) else "ahead"
        return Verdict(figure.name, outcome, best.label, found)
    tied = [sample for sample in others if abs(sample.mean - best.mean) <= margins[sample.label]]
    if tied:
        names = ", ".join(sample.label for sample in tied)
        against = "" if len(others) == 1 else f" against {names}"
        margin = figure.text_of(max(margins[sample.label] for sample in tied))
        text = f"{found}; within the noise{against} (± {margin}, {CONFIDENCE:.0%})"
        return Verdict(figure.name, "within noise", best.label, text)
    margin = figure.text_of(max(margins.values()))
    return Verdict(
        figure.name, "better", best.label, f"{found}; beyond the noise (± {margin}, {CONFIDENCE:.0%})"
    )


def _verdict_of_one(figure: Figure, sample: _Sample) -> Verdict | None:
    """Return mean and spread of runs that differ in nothing but their seed."""
    count = len(sample.values)
    if count < 2:
        return None
    deviation = math.sqrt(sample.squares / (count - 1))
    repeats = counted(count, "seed") if figure.is_quality else counted(count, "run")
    text = f"{figure.text_of(sample.mean)} in the mean of {repeats}, standard deviation "
    return Verdict(figure.name, "one setting", "", text + figure.text_of(deviation))


def _comparison_text(figure: Figure, best: _Sample, others: Sequence[_Sample]) -> str:
    second = others[0]
    against = f"{figure.text_of(second.mean)} of {second.label}{_apart_text(best.mean, second.mean)}"
    rank = "ahead" if len(others) == 1 else f"first of {len(others) + 1} settings"
    return f"{best.label} is {rank}: {figure.text_of(best.mean)} against {against}"


def _apart_text(one: float, other: float) -> str:
    low, high = sorted((one, other))
    if low > 0 and high > _FACTOR * low:
        return f", a factor of {high / low:.2g}"
    return f", {abs(one - other) / abs(other):.1%} apart" if other else ""


@dataclass(frozen=True)
class _Noise:
    """The standard deviation of one run, and the degrees of freedom of its estimate."""

    deviation: float
    freedom: int


def _noise(samples: Sequence[_Sample]) -> _Noise | None:
    """Return the noise pooled over the groups; None if no group has two values."""
    freedom = sum(len(sample.values) - 1 for sample in samples)
    if not freedom:
        return None
    return _Noise(math.sqrt(sum(sample.squares for sample in samples) / freedom), freedom)


def _margin(noise: _Noise | None, one: _Sample, other: _Sample, num_groups: int) -> float:
    """Return the difference of two means that noise alone exceeds in one comparison of twenty."""
    if noise is None:
        return math.inf
    from scipy.special import stdtrit

    num_pairs = num_groups * (num_groups - 1) / 2
    quantile = 1 - (1 - CONFIDENCE) / 2 / num_pairs
    spread = math.sqrt(1 / len(one.values) + 1 / len(other.values))
    return float(stdtrit(noise.freedom, quantile)) * noise.deviation * spread
