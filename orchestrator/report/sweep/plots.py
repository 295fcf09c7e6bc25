"""Image files of a sweep: scaling, heat map of the two settings with the largest effect, parallel
coordinates."""

from __future__ import annotations

from pathlib import Path

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.draw.image import png
from orchestrator.report.draw.marks import Picture, Plot
from orchestrator.report.draw.write import write_whole
from orchestrator.report.sweep.drawings import heat_drawing, parallel_drawing
from orchestrator.report.sweep.facts import title
from orchestrator.report.sweep.scaling_plots import scaling_plots


def draw_pictures(record: SweepRecord, folder: Path) -> list[Path]:
    """Write every picture that the sweep has data for; remove an old one that it has no data for any more."""
    name = title(record)
    pictures = {
        "scaling.png": _picture(f"Scaling of {name}", scaling_plots(record), 2),
        "heatmap.png": _picture(f"Settings of {name}", [heat_drawing(record)]),
        "parallel_coordinates.png": _picture(f"Trials of {name}", [parallel_drawing(record)]),
    }
    written = []
    for file, picture in pictures.items():
        if picture is None:
            (folder / file).unlink(missing_ok=True)
        else:
            written.append(write_whole(folder / file, png(picture)))
    return written


def _picture(title_: str, plots: list[Plot | None] | list[Plot], num_columns: int = 1) -> Picture | None:
    return Picture(title_, plots, num_columns) if any(plots) else None
