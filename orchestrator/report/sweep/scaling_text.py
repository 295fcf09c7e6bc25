"""The scaling table of a sweep as text, for Markdown and for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.sweep.objective import THROUGHPUT, VALIDATION_LOSS
from orchestrator.record.files.ledger import SweepRecord, TrialRow
from orchestrator.report.run.figures.frames import Frame
from orchestrator.report.sweep import facts
from orchestrator.report.sweep.trials import num_devices, phase_shares, trial_settings
from orchestrator.types import PHASES, bytes_text

PHASES_COLUMN = f"{' / '.join(PHASES)}, %"
UNKNOWN = "–"

SCALING_SETTINGS = ("strategy", "precision", "batch_size", "accumulation_steps", "global_batch_size")


def scaling_texts(record: SweepRecord, frame: Frame) -> Frame:
    """Return the cells of a scaling frame for people, with names of columns for people."""
    import pandas as pd

    rows = {row.trial: row for row in record.rows}
    names = [*SCALING_SETTINGS, *facts.other_swept(record)]
    has_loss = _has_loss(record)
    has_metric = record.objective not in (THROUGHPUT, VALIDATION_LOSS)
    cells = []
    for point in frame.to_dict("records"):
        row = rows[point["trial"]]
        quality = {"validation loss": loss_text(row)} if has_loss else {}
        if has_metric:
            quality[facts.objective_name(record)] = _figure_text(facts.objective_value(record, row))
        cells.append(
            {"devices": str(point["devices"])}
            | _setting_cells(row, names)
            | quality
            | _figure_cells(row, point)
        )
    return pd.DataFrame(cells, index=frame.index)


def _setting_cells(row: TrialRow, names: Sequence[str]) -> dict[str, str]:
    settings = trial_settings(row)
    return {
        facts.name_text(name): facts.short_value(settings[name]) if name in settings else UNKNOWN
        for name in names
    }


def _figure_cells(row: TrialRow, point: Mapping[Any, Any]) -> dict[str, str]:
    is_base = point["devices"] == point["against_devices"]
    return {
        "samples/s": facts.rate_text(_known(point["samples_per_second"]), _known(point["interval"])),
        "speed-up": "1×" if is_base else f"{point['speedup']:.2f}×",
        "efficiency": efficiency_text(point["efficiency"], point["efficiency_interval"]),
        "memory": memory_text(row.peak_memory_bytes),
        PHASES_COLUMN: phases_text(phase_shares(row)),
        "whole run": facts.hours_text(_known(point["predicted_hours"])),
        "trial": str(row.trial),
    }


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def efficiency_text(efficiency: float, interval: float) -> str:
    """Return '93% ± 1.2'; without '±' if the interval is missing."""
    spread = "" if math.isnan(interval) else f" ± {100 * interval:.1f}"
    return f"{100 * efficiency:.0f}%{spread}"


def memory_text(peak_bytes: float | None) -> str:
    return bytes_text(peak_bytes) if peak_bytes else UNKNOWN


def phases_text(shares: Mapping[str, float]) -> str:
    """Return the percentages of a step in the order of the phases: '3 / 30 / 44 / 12 / 8'."""
    if not shares:
        return UNKNOWN
    return " / ".join(f"{100 * shares[name]:.0f}" if name in shares else UNKNOWN for name in PHASES)


def loss_text(row: TrialRow) -> str:
    return _figure_text(row.validation_loss)


def _figure_text(figure: float | None) -> str:
    return UNKNOWN if figure is None else f"{figure:.4g}"


def against_text(frame: Frame) -> str:
    """Return the base of speed-up and efficiency in words."""
    bases = set(frame["against_devices"])
    if bases == {1}:
        return "one device"
    if len(bases) == 1:
        return f"{bases.pop()} devices, the fewest there are"
    return "the fewest devices of each series"


def _has_loss(record: SweepRecord) -> bool:
    return any(row.validation_loss is not None for row in record.rows if num_devices(row) is not None)
