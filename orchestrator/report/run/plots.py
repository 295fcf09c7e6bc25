"""Image files of a run: training curves, use of the experts, and the experts' hosts."""

from __future__ import annotations

from pathlib import Path

from orchestrator.report.draw.image import png
from orchestrator.report.draw.marks import Picture
from orchestrator.report.draw.write import write_whole
from orchestrator.report.run.figures.expert_load import layer_loads
from orchestrator.report.run.figures.panels import training_panels
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.hosts_plot import hosts_picture
from orchestrator.report.run.load_plot import load_plot, ratio_key
from orchestrator.report.run.panel_plot import panel_plot


def draw_all(record: RunRecord, folder: Path) -> list[Path]:
    """Write every picture that the record has data for."""
    pictures = {
        "training_metrics.png": training_picture(record),
        "expert_activations.png": experts_picture(record),
        "expert_device_distribution.png": hosts_picture(record),
    }
    return [
        write_whole(folder / name, png(picture)) for name, picture in pictures.items() if picture is not None
    ]


def training_picture(record: RunRecord) -> Picture | None:
    panels = training_panels(record)
    if not panels:
        return None
    return Picture(f"Training of {record.name}", list(map(panel_plot, panels)), min(2, len(panels)))


def experts_picture(record: RunRecord) -> Picture | None:
    layers = layer_loads(record)
    if not layers:
        return None
    counts = {layer.num_experts for layer in layers}
    has_changed = any(layer.has_changed for layer in layers)
    even = f" ({1 / counts.pop():.1%})" if len(counts) == 1 and not has_changed else ""
    return Picture(
        f"Use of the experts of {record.name}",
        list(map(load_plot, layers)),
        min(len(layers), 2 if len(layers) <= 4 else 3),
        color_key=ratio_key(f"share of a layer's tokens, against an even share{even}"),
    )
