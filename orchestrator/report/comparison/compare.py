"""A comparison of runs as a value: page, terminal and ``comparison.json`` show the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.report.comparison.differences import (
    Difference,
    environment_differences,
    setting_differences,
)
from orchestrator.report.comparison.figures import Figure, evaluations_compared, figures
from orchestrator.report.comparison.losses import LossAgreement, loss_agreements
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.comparison.verdicts import Verdict, verdicts
from orchestrator.report.run.figures.outcome import status_text
from orchestrator.types import JSON

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
