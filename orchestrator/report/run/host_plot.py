"""Image file of the experts' hosts: each expert on its host if they are few, else a map of hosts
and layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from orchestrator.report.draw.axes import ticks, value_axis
from orchestrator.report.draw.mpl import (
    COLORS,
    INK,
    LINE,
    MUTED,
    USE_MARKS,
    WARM,
    color_key,
    new_figure,
    style_axes,
    use_colors,
)
from orchestrator.report.run.figures.expert_load import MAX_LOG2, clipped_log2
from orchestrator.report.run.figures.host_load import (
    HOST_MAX_LOG2,
    UNEVEN,
    HostedLayer,
    HostLoad,
    host_load,
    slowest_text,
    steps_text,
    unplaced_text,
)
from orchestrator.report.run.figures.read import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_IN = 0.36
SEGMENTS_IN = 4.6
"""Width of the drawing of experts."""
DIGIT_IN = 0.07
"""Width of a digit: segments narrower than their number have no label."""
LIGHT_TEXT_STRENGTH = 0.6
"""From this strength on a colour is so dark that it needs light text."""
MAP_MARKS = {-1.0: "½× or less", 0.0: "the mean", 1.0: "2× or more"}
MAX_NAMES = 64
MAX_LABELLED = 40
"""Number of layers and of hosts up to which a cell of the map is large enough for a number."""
TIME_LABEL = "rows × size / speed, against the mean host"
_SMALL: dict[str, Any] = {"va": "center_baseline", "fontsize": 8}


def hosts_figure(record: RunRecord) -> Figure | None:
    load = host_load(record)
    if load is None or len(load.hosts) < 2:
        return None
    return _experts_figure(record, load) if load.shows_experts else _map_figure(record, load)


def _experts_figure(record: RunRecord, load: HostLoad) -> Figure:
    """Draw a row per layer: the experts of each host, and the time they take."""
    num_rows = len(load.layers)
    height_in = num_rows * (BAR_IN * len(load.hosts) + 0.42) + 1.5
    figure = new_figure(height_in, _title(record))
    grid = figure.subplots(num_rows, 2, squeeze=False, width_ratios=(5, 3), sharex="col", sharey="row")
    for layer, (left, right) in zip(load.layers, grid, strict=True):
        _draw_experts(left, load, layer)
        _draw_times(right, load, layer.measured, layer.predicted)
        text = slowest_text(layer.slowest, layer.predicted_imbalance)
        right.set_title(text, fontsize=8.5, color=MUTED, loc="left", pad=6)
    _label(grid[-1][0], "share of the layer's size; numbers are experts")
    _label(grid[-1][1], TIME_LABEL)
    _draw_time_legend(figure, load)
    if load.steps:
        _draw_use_key(figure, grid, load)
    return figure


def _draw_experts(axes: Axes, load: HostLoad, layer: HostedLayer) -> None:
    style_axes(axes, f"Layer {layer.index}  {layer.name}".strip(), "")
    axes.grid(False, axis="y")
    for host in range(len(load.hosts)):
        experts = layer.placement.held_by(host)
        left = 0.0
        for expert in experts:
            _draw_segment(axes, load, layer, host, expert, left)
            left += layer.shares[expert]
        if not experts:
            axes.text(0.01 * load.widest, host, "no expert", color=MUTED, **_SMALL)
    axes.set_xlim(0, load.widest * 1.02)
    marks = ticks(0, load.widest, 6)
    axes.xaxis.set_ticks(marks, [f"{100 * mark:.3g}%" for mark in marks])
    _name_hosts(axes, load, "\n")


def _draw_segment(
    axes: Axes, load: HostLoad, layer: HostedLayer, host: int, expert: int, left: float
) -> None:
    share = layer.shares[expert]
    use = layer.use[expert]
    strength = clipped_log2(use) / MAX_LOG2 if use is not None else 0.0
    color = use_colors()((strength + 1) / 2) if use is not None else LINE
    axes.barh(host, share, left=left, height=0.72, color=color, edgecolor=MUTED, linewidth=0.6)
    fits = share / load.widest * SEGMENTS_IN > DIGIT_IN * (len(str(expert)) + 0.7)
    if fits:
        ink = "white" if abs(strength) > LIGHT_TEXT_STRENGTH else INK
        axes.text(left + share / 2, host, str(expert), ha="center", color=ink, **_SMALL)


def _draw_times(
    axes: Axes, load: HostLoad, measured: list[float] | None, predicted: list[float] | None
) -> None:
    """Draw each host's time against the mean: a thick bar as measured, a thin one as predicted."""
    style_axes(axes, "", "")
    axes.grid(False, axis="y")
    places = range(len(load.hosts))
    longest = max(UNEVEN, load.longest)
    if predicted is not None:
        offset = 0.26 if measured else 0.0
        height = 0.2 if measured else 0.5
        axes.barh([place + offset for place in places], predicted, height=height, color=COLORS[5], alpha=0.45)
    if measured is not None:
        colors = [WARM if time > UNEVEN else COLORS[0] for time in measured]
        axes.barh([place - 0.1 for place in places], measured, height=0.5, color=colors)
    for place, time in enumerate(measured or predicted or ()):
        axes.text(1.24 * longest, place, f"{time:.2f}×", ha="right", color=INK, **_SMALL)
    if measured is None and predicted is None:
        axes.text(0.02 * longest, 0, "the load is unknown", color=MUTED, **_SMALL)
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (3, 3)), zorder=3)
    axes.set_xlim(0, longest * 1.25)
    marks = value_axis([0.0, longest], from_zero=True)
    axes.xaxis.set_ticks(marks.ticks, [f"{label}×" for label in marks.labels])


def _label(axes: Axes, text: str) -> None:
    axes.set_xlabel(text, fontsize=8, color=MUTED, loc="right", labelpad=1)


def _name_hosts(axes: Axes, load: HostLoad, separator: str) -> None:
    stride = -(-len(load.hosts) // MAX_NAMES)
    shown = range(0, len(load.hosts), stride)
    names = [
        separator.join(filter(None, (load.label(host), load.relative_speed_text(host)))) for host in shown
    ]
    axes.yaxis.set_ticks(shown, names)
    axes.set_ylim(len(load.hosts) - 0.5, -0.5)


def _draw_time_legend(figure: Figure, load: HostLoad) -> None:
    from matplotlib.patches import Patch

    handles = []
    if load.steps:
        handles.append(Patch(color=COLORS[0], label=f"measured, {steps_text(load)}"))
        handles.append(Patch(color=WARM, label=f"over {UNEVEN:g}×"))
    if load.predicted is not None:
        handles.append(Patch(color=COLORS[5], alpha=0.45, label="predicted"))
    figure.legend(
        handles=handles,
        loc="upper right",
        fontsize=8,
        frameon=False,
        labelcolor=MUTED,
        ncols=3,
        handlelength=1.2,
    )


def _draw_use_key(figure: Figure, grid: Any, load: HostLoad) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    image = ScalarMappable(Normalize(-MAX_LOG2, MAX_LOG2), use_colors())
    unplaced = f"; {unplaced_text(load)}" if load.unplaced else ""
    label = f"colour of an expert: its rows, against an even share of the layer's{unplaced}"
    color_key(figure, image, grid, USE_MARKS, label)


def _map_figure(record: RunRecord, load: HostLoad) -> Figure:
    """Draw a cell per host and layer, and next to it the hosts over all layers."""
    figure = new_figure(min(14.0, 0.3 * len(load.hosts)) + 2.4, _title(record))
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    image = _draw_map(left, load)
    _draw_times(right, load, load.measured, load.predicted)
    right.set_title("All layers", fontsize=9.5, color=INK, loc="left", pad=6)
    text = slowest_text(load.slowest, load.predicted_imbalance, "slowest host of each layer")
    left.set_title(text, fontsize=8.5, color=MUTED, loc="right", pad=6)
    _label(left, "layer")
    _label(right, TIME_LABEL)
    _draw_time_legend(figure, load)
    source = "as measured" if load.steps else "as predicted"
    label = f"time of a host in a layer, {source}, against the mean host of the layer"
    color_key(figure, image, [left, right], MAP_MARKS, label)
    return figure


def _draw_map(axes: Axes, load: HostLoad) -> Any:
    num_hosts = len(load.hosts)
    num_layers = len(load.layers)
    is_labelled = num_layers <= MAX_LABELLED and num_hosts <= MAX_LABELLED
    style_axes(axes, "Hosts and layers", "numbers are experts held" if is_labelled else "")
    axes.grid(False)
    cells = _map_cells(load)
    image = axes.pcolormesh(
        [index - 0.5 for index in range(num_layers + 1)],
        [host - 0.5 for host in range(num_hosts + 1)],
        cells,
        cmap=use_colors(),
        vmin=-HOST_MAX_LOG2,
        vmax=HOST_MAX_LOG2,
        edgecolors="white",
        linewidth=1.2,
    )
    if is_labelled:
        for column, layer in enumerate(load.layers):
            for host in range(num_hosts):
                num_held = len(layer.placement.held_by(host))
                is_dark = abs(cells[host][column]) > LIGHT_TEXT_STRENGTH * HOST_MAX_LOG2
                ink = "white" if is_dark else INK
                look = _SMALL | {"ha": "center", "fontsize": 7.5, "color": ink}
                axes.text(column, host, str(num_held), **look)
    marks = [int(mark) for mark in ticks(0, num_layers - 1, 13) if mark == int(mark)]
    axes.xaxis.set_ticks(marks, [str(mark) for mark in marks])
    _name_hosts(axes, load, ", ")
    return image


def _map_cells(load: HostLoad) -> list[list[float]]:
    """Return the colour values by host and layer; nan if the time is unknown."""
    unknown = [math.nan] * len(load.hosts)
    times = [(layer.measured if load.steps else layer.predicted) or unknown for layer in load.layers]
    return [
        [math.nan if math.isnan(time[host]) else clipped_log2(time[host], HOST_MAX_LOG2) for time in times]
        for host in range(len(load.hosts))
    ]


def _title(record: RunRecord) -> str:
    return f"Hosts of the experts of {record.name}"
