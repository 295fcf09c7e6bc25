"""Training losses of runs, step by step: equal to the bit, or from which step on they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.run.figures.stats import plural


@dataclass(frozen=True)
class LossAgreement:
    """The losses of a run against those of the first run, over the steps that both have."""

    label: str
    reference: str
    num_steps: int
    first_difference: int | None = None
    """The first step whose losses differ; None if all are equal to the bit."""
    losses: tuple[float, float] | None = None
    """The losses of that step: the first run's, and this one's."""
    largest: float = 0.0
    """The largest difference of a step, relative to the first run's loss."""

    @property
    def is_bitwise(self) -> bool:
        return self.num_steps > 0 and self.first_difference is None

    @property
    def text(self) -> str:
        if not self.num_steps:
            return "have no common step"
        if self.losses is None:
            return f"are equal to the bit in all {plural(self.num_steps, 'common step', 'common steps')}"
        ours, theirs = self.losses
        return (
            f"differ from step {self.first_difference} on ({ours!r} and {theirs!r}); largest relative "
            f"difference {self.largest:.2g}, over {plural(self.num_steps, 'common step', 'common steps')}"
        )


def loss_agreements(runs: Sequence[ComparedRun]) -> list[LossAgreement]:
    """Compare each run with the first one."""
    reference, *others = runs
    losses = _losses(reference)
    return [_agreement(run.label, reference.label, losses, _losses(run)) for run in others]


def _agreement(
    label: str, reference: str, expected: dict[int, float], found: dict[int, float]
) -> LossAgreement:
    common = [step for step in expected if step in found]
    apart = [step for step in common if not _is_equal(expected[step], found[step])]
    if not apart:
        return LossAgreement(label, reference, len(common))
    first = apart[0]
    relative = [_relative(expected[step], found[step]) for step in apart]
    return LossAgreement(
        label, reference, len(common), first, (expected[first], found[first]), max(relative, default=0.0)
    )


def _losses(run: ComparedRun) -> dict[int, float]:
    values = {event.step: event.loss for event in run.record.steps}
    return {step: value for step, value in values.items() if value is not None}


def _is_equal(ours: float, theirs: float) -> bool:
    return ours == theirs or (math.isnan(ours) and math.isnan(theirs))


def _relative(ours: float, theirs: float) -> float:
    """Return the relative difference; infinite where one of the losses is no number."""
    difference = abs(ours - theirs)
    if not math.isfinite(difference):
        return math.inf
    return difference / abs(ours) if ours else math.inf
