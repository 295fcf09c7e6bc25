"""A comparison of runs as a value: page, terminal and ``comparison.json`` show the same one.

Training losses are compared step by step: equal to the bit, or from which step on they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.report.comparison.differences import (
    MISSING,
    Difference,
    environment_differences,
    setting_differences,
)
from orchestrator.report.comparison.figures import Figure, evaluations_compared, figures
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.comparison.verdicts import Verdict, verdicts
from orchestrator.report.run.figures.outcome import identity_code, identity_text, status_text
from orchestrator.types import JSON, counted


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
            return f"are equal to the bit in all {counted(self.num_steps, 'common step')}"
        ours, theirs = self.losses
        return (
            f"differ from step {self.first_difference} on ({ours!r} and {theirs!r}); largest relative "
            f"difference {self.largest:.2g}, over {counted(self.num_steps, 'common step')}"
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


NOISE_UNKNOWN = (
    "The noise is unknown: no setting was repeated. Two or three runs of each with another --seed show "
    "which small differences are chance."
)


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison says about its runs. Lists of values are in the order of the runs."""

    runs: tuple[ComparedRun, ...]
    judged_at: str
    """The weights whose validation results are compared."""
    figures: tuple[Figure, ...]
    verdicts: tuple[Verdict, ...]
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    losses: tuple[LossAgreement, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(run.label for run in self.runs)

    @property
    def identities(self) -> tuple[str, ...]:
        """The codes of the runs' weights, "-" of one that is not reproducible; empty if no run is."""
        codes = tuple(identity_text(run.record) for run in self.runs)
        return tuple(code or MISSING for code in codes) if any(codes) else ()

    @property
    def headline(self) -> str:
        """Return the verdict on the first figure of quality in a sentence; empty if there is none."""
        if not self.verdicts:
            return ""
        verdict = self.verdicts[0]
        if verdict.outcome in ("far ahead", "better"):
            return f"{verdict.best} is {verdict.outcome} in {verdict.figure}"
        if verdict.outcome == "ahead":
            return f"{verdict.best} is ahead in {verdict.figure}, perhaps by chance"
        return {
            "within noise": f"No difference in {verdict.figure} beyond the noise",
            "equal": f"The same {verdict.figure} in all runs",
            "one setting": "One setting, several seeds",
        }[verdict.outcome]

    @property
    def notes(self) -> list[str]:
        """Return what a reader must know before the figures."""
        lines = [f"{run.label}: {status_text(run.record)}." for run in self.runs if not run.is_complete]
        if lines:
            lines.append(f"Validation results are compared at: {self.judged_at}.")
        if len({run.last_step for run in self.runs}) > 1:
            counts = ", ".join(f"{run.label} {run.last_step}" for run in self.runs)
            lines.append(f"The runs trained different numbers of steps: {counts}.")
        if any(verdict.outcome in ("far ahead", "ahead") for verdict in self.verdicts):
            lines.append(NOISE_UNKNOWN)
        return lines

    def to_json(self) -> dict[str, JSON]:
        """Return the content of ``comparison.json``."""
        runs: list[JSON] = [
            {
                "label": run.label,
                "location": run.location,
                "status": status_text(run.record),
                "seed": run.seed,
                "identity": identity_code(run.record) or None,
            }
            for run in self.runs
        ]
        results: list[JSON] = [
            {"name": figure.name, "mode": figure.mode, "values": list(figure.values)}
            for figure in self.figures
        ]
        losses: list[Any] = [
            asdict(agreement) | {"bitwise": agreement.is_bitwise} for agreement in self.losses
        ]
        return {
            "task": self.runs[0].record.fact("task"),
            "runs": runs,
            "judged_at": self.judged_at,
            "results": results,
            "verdicts": _as_json(self.verdicts),
            "settings": _as_json(self.settings),
            "environment": _as_json(self.environment),
            "losses": losses,
        }


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare runs of one task."""
    judged_at, _ = evaluations_compared(runs)
    shown = figures(runs)
    return Comparison(
        runs=tuple(runs),
        judged_at=judged_at,
        figures=tuple(shown),
        verdicts=tuple(verdicts(runs, shown)),
        settings=tuple(setting_differences(runs)),
        environment=tuple(environment_differences(runs)),
        losses=tuple(loss_agreements(runs)),
    )


def _as_json(values: Sequence[Any]) -> list[JSON]:
    return [asdict(value) for value in values]
