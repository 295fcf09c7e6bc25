"""Predicted against measured steps: the rows and tables of ``costmodel``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planning.costmodel_cases import Case
from benchmarks.support import markdown_table
from orchestrator.plan.cost.calibration import Calibration
from orchestrator.plan.cost.model import StepPrediction
from orchestrator.types import MIB

MEDIAN_LIMIT = 0.10
WORST_LIMIT = 0.25


@dataclass(frozen=True)
class Row:
    """A configuration, predicted and measured."""

    case: Case
    predicted: StepPrediction
    planned_bytes: float
    seconds: float
    bytes: float | None
    host_s: float | None = None
    """Seconds of the host, where it continues while the device computes."""
    drift: float | None = None
    """Time of the host for its yardstick during this measurement, as a multiple of the time at the
    calibration.
    """
    with_drift: StepPrediction | None = None
    """The prediction with the host's figures times the drift."""

    @property
    def error(self) -> float:
        return self.predicted.step_seconds / self.seconds - 1

    @property
    def error_with_drift(self) -> float | None:
        return None if self.with_drift is None else self.with_drift.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.bytes is None else self.planned_bytes / self.bytes - 1

    def cells(self) -> list[str]:
        """Return times, memory and the larger parts of the predicted step."""
        step_s = self.predicted.step_seconds
        times = [f"{1000 * step_s:.2f}", f"{1000 * self.seconds:.2f}", f"{self.error:+.1%}"]
        if self.drift is not None and self.with_drift is not None:
            drift_ms = 1000 * self.with_drift.step_seconds
            times += [f"{self.drift:.2f}", f"{drift_ms:.2f}", f"{self.error_with_drift:+.1%}"]
        if self.host_s is not None:
            times += [f"{1000 * self.predicted.host_seconds:.2f}", f"{1000 * self.host_s:.2f}"]
        return [*times, *self._memory_cells(), self.predicted.parts_text()]

    def _memory_cells(self) -> list[str]:
        predicted = f"{self.planned_bytes / MIB:,.0f}"
        if self.bytes is None or self.memory_error is None:
            return [predicted, "–", "–"]
        return [predicted, f"{self.bytes / MIB:,.0f}", f"{self.memory_error:+.0%}"]


def table(rows: Sequence[Row]) -> str:
    columns = ["on", "configuration", "predicted ms", "measured ms", "error"]
    if any(row.drift is not None for row in rows):
        columns += ["drift of the host", "with it ms", "error"]
    if any(row.host_s is not None for row in rows):
        columns += ["host predicted ms", "host measured ms"]
    columns += ["predicted MiB", "measured MiB", "error", "predicted parts"]
    return markdown_table(columns, [[row.case.where, row.case.name, *row.cells()] for row in rows])


def verdict(rows: Sequence[Row]) -> str:
    """Return median and worst error of the configurations that count, and whether the limits hold."""
    counted = [row for row in rows if row.case.counts]
    if not counted:
        return ""
    errors = [abs(row.error) for row in counted]
    median = statistics.median(errors)
    worst = max(errors)
    outcome = "met" if median <= MEDIAN_LIMIT and worst <= WORST_LIMIT else "missed"
    line = f"Time, {len(errors)} configurations: median error {median:.1%}, worst {worst:.1%}"
    line += f" (bars: {MEDIAN_LIMIT:.0%}, {WORST_LIMIT:.0%}; {outcome})."
    memory = [abs(row.memory_error) for row in counted if row.memory_error is not None]
    if memory:
        line += f" Memory: median error {statistics.median(memory):.0%}, worst {max(memory):.0%}."
    return line + "\n" + _drift_text(counted)


def _drift_text(counted: Sequence[Row]) -> str:
    errors = [abs(row.error_with_drift) for row in counted if row.error_with_drift is not None]
    if not errors:
        return ""
    return (
        "\nA calibration describes the machine at one time. The drift is the host's time, during "
        "each measurement, for a "
        "small step that is no part of the table, as a multiple of its time at the calibration. "
        "With the host's figures "
        f"times the drift: median error {statistics.median(errors):.1%}, worst {max(errors):.1%} "
        "(for comparison: the bars are for the errors without it).\n"
    )


def reference_table(calibration: Calibration) -> str:
    """Return how well the figures of a calibration explain the steps that they were fitted to."""
    profile = calibration.profile(1)
    rows = [
        [
            entry.name,
            f"{1000 * entry.measured_s:.2f}",
            f"{1000 * entry.fitted_s:.2f}",
            f"{entry.fitted_s / entry.measured_s - 1:+.1%}",
        ]
        for entry in profile.references
    ]
    text = "\nThe calibration's own steps, and what its figures say of them:\n\n"
    text += markdown_table(["step", "measured ms", "by the figures ms", "error"], rows)
    if not profile.device.asynchronous:
        return text
    factor = f"{profile.device.sustained:.2f} times as long as the sum of their operations by themselves"
    return text + (
        "\nSmall steps: the host's time; large ones: the whole step. "
        f"Large ones took {factor}, and all are predicted to.\n"
    )
