"""Pictures of a run: how the training went, how its experts were used, and (see ``host_plot``) where they live."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.report.draw.axes import step_axis, ticks
from orchestrator.report.draw.mpl import (
    BAD,
    COLORS,
    MUTED,
    USE_MARKS,
    dress,
    key_bar,
    new_figure,
    png,
    warmth,
)
from orchestrator.report.draw.write import write_whole
from orchestrator.report.run.expert_load import MAX_DOUBLINGS, LayerLoad, doublings, layer_loads
from orchestrator.report.run.host_plot import hosts_figure
from orchestrator.report.run.panels import Panel, PanelCurve, panels
from orchestrator.report.run.read import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_DOTS = 40


def draw_all(record: RunRecord, folder: Path) -> list[Path]:
    """Writes every picture the record has data for."""
    drawn = [
        ("training_metrics.png", training_figure(record)),
        ("expert_activations.png", experts_figure(record)),
        ("expert_device_distribution.png", hosts_figure(record)),
    ]
    return [write_whole(folder / name, png(figure)) for name, figure in drawn if figure is not None]


def training_figure(record: RunRecord) -> Figure | None:
    shown = panels(record)
    if not shown:
        return None
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(2.5 * rows + 0.4, f"Training of {record.name}")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, shown, strict=False):
        _draw_panel(axes, panel)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    dress(axes, panel.title, panel.unit)
    for curve in panel.curves:
        _draw_curve(axes, curve)
    _mark(axes, panel)
    _scale(axes, panel)
    axes.set_xlabel(panel.x_label, fontsize=8, color=MUTED, loc="right", labelpad=1)
    if panel.needs_key or panel.broken:
        axes.legend(fontsize=7.5, frameon=False, labelcolor=MUTED, handlelength=1.4, loc="best")


def _draw_curve(axes: Axes, curve: PanelCurve) -> None:
    xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
    color = COLORS[curve.color % len(COLORS)]
    if curve.look == "bars":
        axes.bar(xs, ys, width=0.62, color=color, label=curve.label)
    elif curve.look == "raw":
        axes.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
    elif curve.look == "dots":
        # Many dots would run into one another: then the line says it alone.
        size = 3.6 if len(xs) <= MANY_DOTS else 0
        axes.plot(
            xs,
            ys,
            color=color,
            marker="o",
            markersize=size,
            linewidth=1.2 if len(xs) > 1 else 0,
            label=curve.label,
        )
    else:
        axes.plot(
            xs,
            ys,
            color=color,
            linewidth=1.7,
            marker="o" if len(xs) == 1 else "",
            markersize=4,
            label=curve.label,
        )


def _mark(axes: Axes, panel: Panel) -> None:
    """Resumes and out-of-memory steps as thin lines, values that are no number as red ticks on the lower edge."""
    for x, kind in panel.marks:
        axes.axvline(
            x, color=BAD if kind == "oom" else MUTED, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0.5
        )
    if panel.broken:
        below = axes.get_xaxis_transform()
        axes.plot(
            panel.broken,
            [0.02] * len(panel.broken),
            "|",
            color=BAD,
            markersize=7,
            transform=below,
            label="nan or infinite",
        )


def _scale(axes: Axes, panel: Panel) -> None:
    x, y = panel.x_axis, panel.y_axis
    if y.log:
        axes.set_yscale("log")
    margin = 0.0 if any(curve.look == "bars" for curve in panel.curves) else (x.high - x.low) * 0.02
    axes.set_xlim(x.low - margin, x.high + margin)
    axes.set_ylim(y.low, y.high)
    for side, axis in ((axes.xaxis, x), (axes.yaxis, y)):
        side.set_ticks(axis.ticks, axis.labels)
        side.set_ticks([], minor=True)


def experts_figure(record: RunRecord) -> Figure | None:
    layers = layer_loads(record)
    if not layers:
        return None
    columns = min(len(layers), 2 if len(layers) <= 4 else 3)
    rows = -(-len(layers) // columns)
    figure = new_figure(2.6 * rows + 1.0, f"Use of the experts of {record.name}")
    grid = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    for axes, layer in zip(grid.flat, layers, strict=False):
        image = _draw_layer(axes, layer)
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    _ratio_bar(figure, image, grid, layers)
    return figure


def _draw_layer(axes: Axes, layer: LayerLoad) -> Any:
    """Rows are experts, columns time."""
    dress(axes, f"Layer {layer.layer}", "")
    axes.grid(False)
    edges, experts = [layer.steps[0] - _first_width(layer), *layer.steps], layer.experts
    cells = [[math.nan if ratio is None else doublings(ratio) for ratio in row] for row in layer.ratios]
    image = axes.pcolormesh(
        edges,
        range(experts + 1),
        cells,
        cmap=warmth(),
        vmin=-MAX_DOUBLINGS,
        vmax=MAX_DOUBLINGS,
        rasterized=True,
    )
    axes.set_ylim(experts, 0)
    shown = sorted({int(mark) for mark in ticks(0, experts - 1, 9) if mark == int(mark)})
    axes.yaxis.set_ticks([mark + 0.5 for mark in shown], [str(mark) for mark in shown])
    marks = step_axis(layer.steps, labels=4)
    axes.xaxis.set_ticks(marks.ticks if len(layer.steps) > 1 else [sum(edges) / 2], marks.labels)
    axes.set_ylabel("expert", fontsize=8, color=MUTED)
    axes.set_xlabel("step", fontsize=8, color=MUTED, loc="right", labelpad=1)
    return image


def _first_width(layer: LayerLoad) -> int:
    return layer.steps[1] - layer.steps[0] if len(layer.steps) > 1 else max(1, layer.steps[0])


def _ratio_bar(figure: Figure, image: Any, grid: Any, layers: list[LayerLoad]) -> None:
    counts = {layer.experts for layer in layers}
    even = f" ({1 / counts.pop():.1%})" if len(counts) == 1 else ""
    key_bar(figure, image, grid, USE_MARKS, f"share of a layer's tokens, against an even share{even}")
