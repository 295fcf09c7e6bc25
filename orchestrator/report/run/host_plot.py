"""Where the experts live, as a picture: each expert on its host where there are few, a map of hosts and layers where not."""

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
    dress,
    key_bar,
    new_figure,
    warmth,
)
from orchestrator.report.run.expert_load import MAX_DOUBLINGS, doublings
from orchestrator.report.run.host_load import (
    HOST_DOUBLINGS,
    UNEVEN,
    HostLoad,
    LayerLoad,
    host_load,
    lost_text,
    slowest_text,
    span_text,
)
from orchestrator.report.run.read import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_IN = 0.36
SEGMENTS_IN, DIGIT_IN = 4.6, 0.07
"""Width of the drawing of experts, and of a digit of their labels: narrower segments go without."""
MAP_MARKS = {-1.0: "½× or less", 0.0: "the mean", 1.0: "2× or more"}
MAX_NAMES = 64
MAX_CELLS_NAMED = 40
"""Layers or hosts up to which the cells of the map have room for a number."""


def hosts_figure(record: RunRecord) -> Figure | None:
    found = host_load(record)
    if found is None or len(found.hosts) < 2:
        return None
    return _by_expert(record, found) if found.detailed else _by_layer(record, found)


def _by_expert(record: RunRecord, found: HostLoad) -> Figure:
    """A row per layer: which experts each host holds, and the time they take it."""
    rows, hosts = len(found.layers), len(found.hosts)
    figure = new_figure(rows * (BAR_IN * hosts + 0.42) + 1.5, _title(record))
    grid = figure.subplots(rows, 2, squeeze=False, width_ratios=(5, 3), sharex="col", sharey="row")
    for layer, (left, right) in zip(found.layers, grid, strict=True):
        _draw_experts(left, found, layer)
        _draw_times(right, found, layer.measured, layer.predicted)
        right.set_title(
            slowest_text(layer.slowest, layer.predicted_imbalance),
            fontsize=8.5,
            color=MUTED,
            loc="left",
            pad=6,
        )
    _label(grid[-1][0], "share of the layer's size; numbers are experts")
    _label(grid[-1][1], "rows × size / speed, against the mean host")
    _time_key(figure, found)
    if found.steps:
        _use_key(figure, grid, found)
    return figure


def _draw_experts(axes: Axes, found: HostLoad, layer: LayerLoad) -> None:
    dress(axes, f"Layer {layer.index}  {layer.name}".strip(), "")
    axes.grid(False, axis="y")
    colors, widest = warmth(), found.widest
    for host, held in enumerate(layer.placement.experts_by_host):
        left = 0.0
        for expert in held:
            share, use = layer.shares[expert], layer.use[expert]
            strength = doublings(use) / MAX_DOUBLINGS if use is not None else 0.0
            face = colors((strength + 1) / 2) if use is not None else LINE
            axes.barh(host, share, left=left, height=0.72, color=face, edgecolor=MUTED, linewidth=0.6)
            if share / widest * SEGMENTS_IN > DIGIT_IN * (len(str(expert)) + 0.7):
                ink = "white" if abs(strength) > 0.6 else INK
                axes.text(
                    left + share / 2,
                    host,
                    str(expert),
                    ha="center",
                    va="center_baseline",
                    fontsize=8,
                    color=ink,
                )
            left += share
        if not held:
            axes.text(0.01 * widest, host, "no expert", va="center_baseline", fontsize=8, color=MUTED)
    axes.set_xlim(0, widest * 1.02)
    marks = ticks(0, widest, 6)
    axes.xaxis.set_ticks(marks, [f"{mark:.3g}%" for mark in (100 * mark for mark in marks)])
    _name_hosts(axes, found, "\n")


def _draw_times(
    axes: Axes, found: HostLoad, measured: list[float] | None, predicted: list[float] | None
) -> None:
    """A host's time against the mean: the thick bar as measured, the thin one as predicted."""
    dress(axes, "", "")
    axes.grid(False, axis="y")
    places, longest = range(len(found.hosts)), max(UNEVEN, found.longest)
    if predicted is not None:
        at = [place + (0.26 if measured else 0.0) for place in places]
        axes.barh(at, predicted, height=0.2 if measured else 0.5, color=COLORS[5], alpha=0.45)
    if measured is not None:
        colors = [WARM if time > UNEVEN else COLORS[0] for time in measured]
        axes.barh([place - 0.1 for place in places], measured, height=0.5, color=colors)
    for place, time in enumerate(measured or predicted or ()):
        axes.text(
            1.24 * longest, place, f"{time:.2f}×", ha="right", va="center_baseline", fontsize=8, color=INK
        )
    if measured is None and predicted is None:
        axes.text(
            0.02 * longest, 0, "nothing is known of the load", va="center_baseline", fontsize=8, color=MUTED
        )
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (3, 3)), zorder=3)
    axes.set_xlim(0, longest * 1.25)
    marks = value_axis([0.0, longest], from_zero=True)
    axes.xaxis.set_ticks(marks.ticks, [f"{label}×" for label in marks.labels])


def _label(axes: Axes, text: str) -> None:
    axes.set_xlabel(text, fontsize=8, color=MUTED, loc="right", labelpad=1)


def _name_hosts(axes: Axes, found: HostLoad, between: str) -> None:
    every = -(-len(found.hosts) // MAX_NAMES)
    shown = range(0, len(found.hosts), every)
    axes.yaxis.set_ticks(
        shown, [between.join(filter(None, (found.label(place), found.pace(place)))) for place in shown]
    )
    axes.set_ylim(len(found.hosts) - 0.5, -0.5)


def _time_key(figure: Figure, found: HostLoad) -> None:
    from matplotlib.patches import Patch

    seen = [Patch(color=COLORS[0], label=f"measured, {span_text(found)}")] if found.steps else []
    seen += [Patch(color=WARM, label=f"over {UNEVEN:g}×")] if found.steps else []
    handles = [*seen, Patch(color=COLORS[5], alpha=0.45, label="predicted")]
    figure.legend(
        handles=handles,
        loc="upper right",
        fontsize=8,
        frameon=False,
        labelcolor=MUTED,
        ncols=3,
        handlelength=1.2,
    )


def _use_key(figure: Figure, grid: Any, found: HostLoad) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    image = ScalarMappable(Normalize(-MAX_DOUBLINGS, MAX_DOUBLINGS), warmth())
    lost = f"; {lost_text(found)}" if found.unplaced else ""
    key_bar(
        figure,
        image,
        grid,
        USE_MARKS,
        f"colour of an expert: its rows, against an even share of the layer's{lost}",
    )


def _by_layer(record: RunRecord, found: HostLoad) -> Figure:
    """A cell per host and layer, and the hosts over all layers beside it."""
    hosts = len(found.hosts)
    figure = new_figure(min(14.0, 0.3 * hosts) + 2.4, _title(record))
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    image = _draw_map(left, found)
    _draw_times(right, found, found.measured, found.predicted)
    right.set_title("All layers", fontsize=9.5, color=INK, loc="left", pad=6)
    left.set_title(
        slowest_text(found.slowest, found.predicted_imbalance, "slowest host of each layer"),
        fontsize=8.5,
        color=MUTED,
        loc="right",
        pad=6,
    )
    _label(left, "layer")
    _label(right, "rows × size / speed, against the mean host")
    _time_key(figure, found)
    told = "as measured" if found.steps else "as predicted"
    key_bar(
        figure,
        image,
        [left, right],
        MAP_MARKS,
        f"time of a host in a layer, {told}, against the mean host of the layer",
    )
    return figure


def _draw_map(axes: Axes, found: HostLoad) -> Any:
    layers, hosts = found.layers, range(len(found.hosts))
    named = len(layers) <= MAX_CELLS_NAMED and len(hosts) <= MAX_CELLS_NAMED
    dress(axes, "Hosts and layers", "numbers are experts held" if named else "")
    axes.grid(False)
    times = [
        (layer.measured if found.steps else layer.predicted) or [math.nan] * len(hosts) for layer in layers
    ]
    cells = [
        [math.nan if math.isnan(each[host]) else doublings(each[host], HOST_DOUBLINGS) for each in times]
        for host in hosts
    ]
    edges_x, edges_y = (
        [index - 0.5 for index in range(len(layers) + 1)],
        [host - 0.5 for host in range(len(hosts) + 1)],
    )
    image = axes.pcolormesh(
        edges_x,
        edges_y,
        cells,
        cmap=warmth(),
        vmin=-HOST_DOUBLINGS,
        vmax=HOST_DOUBLINGS,
        edgecolors="white",
        linewidth=1.2,
    )
    if named:
        for column, layer in enumerate(layers):
            for host, held in enumerate(layer.placement.experts_by_host):
                ink = "white" if abs(cells[host][column]) > 0.6 * HOST_DOUBLINGS else INK
                axes.text(
                    column, host, str(len(held)), ha="center", va="center_baseline", fontsize=7.5, color=ink
                )
    marks = [int(mark) for mark in ticks(0, len(layers) - 1, 13) if mark == int(mark)]
    axes.xaxis.set_ticks(marks, [str(mark) for mark in marks])
    _name_hosts(axes, found, ", ")
    return image


def _title(record: RunRecord) -> str:
    return f"Where the experts of {record.name} live"
