"""Image files of a run: training curves, use of the experts, and (in ``host_plot``) the hosts of
the experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.report.draw.axes import step_axis, ticks
from orchestrator.report.draw.mpl import (
    BAD,
    COLORS,
    LINE,
    MUTED,
    USE_MARKS,
    color_key,
    new_figure,
    png,
    style_axes,
    use_colors,
)
from orchestrator.report.draw.write import write_whole
from orchestrator.report.run.figures.expert_load import MAX_LOG2, LayerLoad, clipped_log2, layer_loads
from orchestrator.report.run.figures.panels import Panel, PanelCurve, training_panels
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.host_plot import hosts_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DOTS = 40
WEIGHTS_COLORS = (COLORS[4], COLORS[3])
"""Of the step whose weights were kept, and of the best one where it is another."""


def draw_all(record: RunRecord, folder: Path) -> list[Path]:
    """Write every picture that the record has data for."""
    figures = {
        "training_metrics.png": training_figure(record),
        "expert_activations.png": experts_figure(record),
        "expert_device_distribution.png": hosts_figure(record),
    }
    return [write_whole(folder / name, png(figure)) for name, figure in figures.items() if figure is not None]


def training_figure(record: RunRecord) -> Figure | None:
    panels = training_panels(record)
    if not panels:
        return None
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = new_figure(2.5 * num_rows + 0.4, f"Training of {record.name}")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    style_axes(axes, panel.title, panel.unit)
    for curve in panel.curves:
        _draw_curve(axes, curve)
    _draw_marks(axes, panel)
    _set_scale(axes, panel)
    axes.set_xlabel(panel.x_label, fontsize=8, color=MUTED, loc="right", labelpad=1)
    if panel.needs_legend or panel.weights or panel.non_finite_steps:
        axes.legend(fontsize=7.5, frameon=False, labelcolor=MUTED, handlelength=1.4, loc="best")


def _draw_curve(axes: Axes, curve: PanelCurve) -> None:
    xs = [x for x, _ in curve.points]
    ys = [y for _, y in curve.points]
    color = COLORS[curve.color % len(COLORS)]
    if curve.look == "bars":
        axes.bar(xs, ys, width=0.62, color=color, label=curve.label)
        return
    if curve.look == "raw":
        axes.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
        return
    if curve.look == "dots":
        # Many dots would overlap: then the line alone is drawn.
        size = 3.6 if len(xs) <= MAX_DOTS else 0
        look: dict[str, Any] = {"marker": "o", "markersize": size, "linewidth": 1.2 if len(xs) > 1 else 0}
    else:
        look = {"marker": "o" if len(xs) == 1 else "", "markersize": 4, "linewidth": 1.7}
    axes.plot(xs, ys, color=color, label=curve.label, **look)


def _draw_marks(axes: Axes, panel: Panel) -> None:
    """Draw resumes and out-of-memory steps as dashed lines, kept weights as a solid one, and nan and inf as
    red ticks on the lower edge."""
    for step, kind in panel.marks:
        color = BAD if kind == "oom" else MUTED
        axes.axvline(step, color=color, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0.5)
    for (step, text), color in zip(panel.weights, WEIGHTS_COLORS, strict=False):
        axes.axvline(step, color=color, linewidth=1.4, zorder=0.6, label=text)
    if panel.non_finite_steps:
        heights = [0.02] * len(panel.non_finite_steps)
        look: dict[str, Any] = {"color": BAD, "markersize": 7, "label": "nan or infinite"}
        axes.plot(panel.non_finite_steps, heights, "|", transform=axes.get_xaxis_transform(), **look)


def _set_scale(axes: Axes, panel: Panel) -> None:
    x = panel.x_axis
    y = panel.y_axis
    if y.log:
        axes.set_yscale("log")
    margin = 0.0 if panel.has_bars else (x.high - x.low) * 0.02
    axes.set_xlim(x.low - margin, x.high + margin)
    axes.set_ylim(y.low, y.high)
    for side, axis in ((axes.xaxis, x), (axes.yaxis, y)):
        side.set_ticks(axis.ticks, axis.labels)
        side.set_ticks([], minor=True)


def experts_figure(record: RunRecord) -> Figure | None:
    layers = layer_loads(record)
    if not layers:
        return None
    num_columns = min(len(layers), 2 if len(layers) <= 4 else 3)
    num_rows = -(-len(layers) // num_columns)
    figure = new_figure(2.6 * num_rows + 1.0, f"Use of the experts of {record.name}")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    image: Any = None
    for axes, layer in zip(grid.flat, layers, strict=False):
        image = _draw_layer(axes, layer)
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    counts = {layer.num_experts for layer in layers}
    has_changed = any(layer.has_changed for layer in layers)
    even = f" ({1 / counts.pop():.1%})" if len(counts) == 1 and not has_changed else ""
    color_key(figure, image, grid, USE_MARKS, f"share of a layer's tokens, against an even share{even}")
    return figure


def _draw_layer(axes: Axes, layer: LayerLoad) -> Any:
    """Draw a layer: rows are experts, columns time; hatched where an expert did not exist."""
    style_axes(axes, f"Layer {layer.layer}", "")
    axes.grid(False)
    if layer.has_changed:
        axes.patch.set(hatch="////", edgecolor=LINE)
    num_rows = len(layer.ids)
    edges = [layer.steps[0] - _first_width(layer), *layer.steps]
    cells = [[math.nan if ratio is None else clipped_log2(ratio) for ratio in row] for row in layer.ratios]
    image = axes.pcolormesh(
        edges,
        range(num_rows + 1),
        cells,
        cmap=use_colors(),
        vmin=-MAX_LOG2,
        vmax=MAX_LOG2,
        rasterized=True,
    )
    axes.set_ylim(num_rows, 0)
    rows = sorted({int(mark) for mark in ticks(0, num_rows - 1, 9) if mark == int(mark)})
    axes.yaxis.set_ticks([row + 0.5 for row in rows], [str(layer.ids[row]) for row in rows])
    marks = step_axis(layer.steps, max_labels=4)
    axes.xaxis.set_ticks(marks.ticks if len(layer.steps) > 1 else [sum(edges) / 2], marks.labels)
    axes.set_ylabel("expert", fontsize=8, color=MUTED)
    axes.set_xlabel("step", fontsize=8, color=MUTED, loc="right", labelpad=1)
    return image


def _first_width(layer: LayerLoad) -> int:
    return layer.steps[1] - layer.steps[0] if len(layer.steps) > 1 else max(1, layer.steps[0])
