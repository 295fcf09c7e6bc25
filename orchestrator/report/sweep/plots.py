"""Image files of a sweep: scaling, heat map of the two settings with the largest effect, parallel
coordinates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.record.files.ledger import SweepRecord
from orchestrator.report.draw.axes import tick_text
from orchestrator.report.draw.mpl import COLORS, INK, LINE, MUTED, new_figure, plain_text, png, style_axes
from orchestrator.report.draw.write import write_whole
from orchestrator.report.sweep.facts import name_text, objective_name, one_line, series_label, title
from orchestrator.report.sweep.heatmap import Cell, HeatMap, heat_map
from orchestrator.report.sweep.parallel_coords import SPREAD, Line, ParallelPlot, parallel_plot
from orchestrator.report.sweep.scaling import ScalingSeries, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SERIES = 6
BEST = "#e8590c"
BLUES = ("#dfe4ef", "#93a8ea", "#3b5bdb", "#1c2f80")
GREY = "#f1f3f5"
HATCH_GREY = "#dfe3e8"
LIGHT_TEXT_STRENGTH = 0.5
"""From this strength on a cell is so dark that it needs light text."""
LOG_DEVICES = 4
"""From this ratio of the largest to the smallest number of devices on both axes are logarithmic."""
_DOTTED = (0, (1, 2))
_DASHED = (0, (5, 2))


def draw_pictures(record: SweepRecord, folder: Path) -> list[Path]:
    """Write every picture that the sweep has data for; remove an old one that it has no data for any more."""
    figures = {
        "scaling.png": scaling_figure(record),
        "heatmap.png": heat_figure(record),
        "parallel_coordinates.png": parallel_figure(record),
    }
    written = []
    for name, figure in figures.items():
        if figure is None:
            (folder / name).unlink(missing_ok=True)
        else:
            written.append(write_whole(folder / name, png(figure)))
    return written


def scaling_figure(record: SweepRecord) -> Figure | None:
    shown = shown_series(record)
    if not shown:
        return None
    num_legend_rows = -(-len(shown) // 2)
    figure = new_figure(4.3 + 0.19 * num_legend_rows, f"Scaling of {title(record)}")
    speed, efficiency = figure.subplots(1, 2)
    for place, series in enumerate(shown):
        _draw_series(speed, efficiency, series, COLORS[place % len(COLORS)], _label(series, shown))
    devices = sorted({int(count) for series in shown for count in series.points["devices"]})
    style_axes(speed, "Throughput", "samples/s")
    style_axes(efficiency, "Efficiency", "% of the base, per device")
    efficiency.axhline(100, color=MUTED, linewidth=1.2, linestyle=_DOTTED, zorder=1)
    efficiency.set_ylim(0, max(110.0, efficiency.get_ylim()[1]))
    speed.plot([], [], color=MUTED, linewidth=1.2, linestyle=_DOTTED, label="ideal")
    for axes in (speed, efficiency):
        _device_axis(axes, devices)
    _speed_axis(speed, devices)
    figure.legend(
        *speed.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=2,
        fontsize=8,
        frameon=False,
        labelcolor=MUTED,
    )
    return figure


def shown_series(record: SweepRecord) -> list[ScalingSeries]:
    """Return the fastest series, of both kinds if there are both."""
    strong = series_of(record, "strong")
    weak = series_of(record, "weak")
    half = MAX_SERIES // 2
    # A kind with fewer series than half leaves its places to the other.
    return [*strong[: max(half, MAX_SERIES - len(weak))], *weak[: max(half, MAX_SERIES - len(strong))]]


def _label(series: ScalingSeries, shown: list[ScalingSeries]) -> str:
    same_kind = [other for other in shown if other.kind == series.kind]
    return plain_text(one_line(f"{series.kind}: {series_label(series, same_kind)}", 66))


def _draw_series(speed: Axes, efficiency: Axes, series: ScalingSeries, color: str, label: str) -> None:
    points = series.points
    devices = points["devices"].tolist()
    rates = points["samples_per_second"]
    look: dict[str, Any] = {
        "color": color,
        "linestyle": "-" if series.kind == "strong" else _DASHED,
        "linewidth": 1.7,
        "marker": "o",
        "markersize": 4,
        "capsize": 3,
        "elinewidth": 1.1,
    }
    rate_errors = rates * points["interval"].fillna(0.0)
    speed.errorbar(devices, rates.tolist(), yerr=rate_errors.tolist(), label=label, **look)
    ideal = [rates.iloc[0] * count / devices[0] for count in devices]
    speed.plot(devices, ideal, color=color, alpha=0.55, linewidth=1.1, linestyle=_DOTTED, zorder=1)
    percents = 100 * points["efficiency"]
    errors = 100 * points["efficiency_interval"].fillna(0.0)
    efficiency.errorbar(devices, percents.tolist(), yerr=errors.tolist(), **look)


def _device_axis(axes: Axes, devices: list[int]) -> None:
    if devices[-1] / devices[0] >= LOG_DEVICES:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_ticks(devices, [str(count) for count in devices])
    axes.xaxis.set_ticks([], minor=True)
    axes.set_xlabel("devices", fontsize=8, color=MUTED, loc="right", labelpad=1)


def _speed_axis(axes: Axes, devices: list[int]) -> None:
    """Scale the throughput like the devices: if both are logarithmic, the ideal lines are straight."""
    if devices[-1] / devices[0] < LOG_DEVICES:
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(lambda value, _: tick_text(value))
        return
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    candidates = [factor * 10.0**power for power in range(-3, 12) for factor in (1, 2, 5)]
    marks = [mark for mark in candidates if low <= mark <= high]
    axes.yaxis.set_ticks(marks, [tick_text(mark) for mark in marks])
    axes.yaxis.set_ticks([], minor=True)


def heat_figure(record: SweepRecord) -> Figure | None:
    shown = heat_map(record)
    if shown is None:
        return None
    settings = name_text(shown.x) + (f" and {name_text(shown.y)}" if shown.y else "")
    height = 1.15 + 0.46 * len(shown.rows) + 0.25 * bool(shown.others)
    figure = new_figure(height, f"{objective_name(record).capitalize()} by {settings}")
    axes = figure.subplots()
    subtitle = ""
    if shown.others:
        subtitle = one_line(f"each cell the best over {', '.join(map(name_text, shown.others))}", 66)
    style_axes(axes, subtitle, "")
    for y, line in enumerate(shown.cells):
        for x, cell in enumerate(line):
            _draw_cell(axes, x, y, cell, len(shown.columns))
    _heat_axes(axes, shown)
    return figure


def _draw_cell(axes: Axes, x: int, y: int, cell: Cell, num_columns: int) -> None:
    from matplotlib.patches import Rectangle

    is_known = cell.value is not None
    is_hatched = bool(cell.text) and not is_known
    color = blues()(cell.strength) if is_known else GREY
    border = 0 if is_hatched else 1.5
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=border))
    if is_hatched:
        # The hatch takes the colour of the edge, so the white border is a rectangle of its own.
        hatch = {"facecolor": "none", "edgecolor": HATCH_GREY, "hatch": "////", "linewidth": 0}
        axes.add_patch(Rectangle((x, y), 1, 1, **hatch))
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor="none", edgecolor="white", linewidth=1.5))
    if is_known and cell.strength == 1:
        frame = {"facecolor": "none", "edgecolor": BEST, "linewidth": 2.2, "zorder": 3}
        axes.add_patch(Rectangle((x + 0.02, y + 0.05), 0.96, 0.9, **frame))
    ink = INK if is_known else MUTED
    if is_known and cell.strength > LIGHT_TEXT_STRENGTH:
        ink = "white"
    size = 9 if num_columns <= 9 else 7.5
    axes.text(x + 0.5, y + 0.5, cell.text, ha="center", va="center", fontsize=size, color=ink, zorder=4)


def _heat_axes(axes: Axes, shown: HeatMap) -> None:
    axes.grid(False)
    axes.set_xlim(0, len(shown.columns))
    axes.set_ylim(len(shown.rows), 0)
    columns = [plain_text(one_line(text, 18)) for text in shown.columns]
    rows = [plain_text(one_line(text, 24)) for text in shown.rows]
    axes.xaxis.set_ticks([place + 0.5 for place in range(len(columns))], columns)
    axes.yaxis.set_ticks([place + 0.5 for place in range(len(rows))], rows)
    fits = max(map(len, shown.columns)) * len(shown.columns) <= 110
    axes.tick_params(axis="x", labelsize=8.5 if fits else 6.5)
    axes.tick_params(axis="y", labelsize=8.5)
    axes.set_xlabel(plain_text(name_text(shown.x)), fontsize=8.5, color=INK)
    axes.set_ylabel(plain_text(name_text(shown.y)) if shown.y else "", fontsize=8.5, color=INK)
    axes.spines["bottom"].set_visible(False)


def parallel_figure(record: SweepRecord) -> Figure | None:
    plot = parallel_plot(record)
    if plot is None:
        return None
    figure = new_figure(4.6, f"Trials of {title(record)}")
    axes = figure.subplots()
    direction = "lower" if plot.best_is_low else "higher"
    style_axes(axes, f"the darker the {direction} its {objective_name(record)}; orange is the best", "")
    width = min(1.6, 0.7 + 40 / len(plot.lines))
    for line in plot.lines[:-1]:
        _draw_line(axes, line, blues()(0.12 + 0.88 * line.strength), width, 2)
    _draw_line(axes, plot.lines[-1], BEST, 3.0, 4)
    _parallel_axes(axes, plot)
    return figure


def _draw_line(axes: Axes, line: Line, color: Any, width: float, level: int) -> None:
    """Draw a curve that crosses each axis horizontally, so that lines through one value stay apart."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    points = [(0.0, line.places[0])]
    codes = [Curve.MOVETO]
    for index, (left, right) in enumerate(pairwise(line.places)):
        points += [(index + 0.42, left), (index + 0.58, right), (index + 1.0, right)]
        codes += [Curve.CURVE4] * 3
    look = {"facecolor": "none", "edgecolor": color, "linewidth": width, "capstyle": "round", "zorder": level}
    axes.add_patch(PathPatch(Curve(points, codes), **look))


def _parallel_axes(axes: Axes, plot: ParallelPlot) -> None:
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    last = len(plot.scales) - 1
    axes.set_xlim(-0.12 * max(1, last) ** 0.5, last + 0.1)
    axes.set_ylim(-0.05, 1.05)
    axes.yaxis.set_ticks([])
    axes.xaxis.set_ticks(range(last + 1), [plain_text(one_line(scale.name, 22)) for scale in plot.scales])
    axes.tick_params(axis="x", labelsize=9, colors=INK)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.82, "pad": 1.0}
    look: dict[str, Any] = {
        "ha": "right",
        "va": "center",
        "fontsize": 8,
        "color": INK,
        "bbox": box,
        "zorder": 5,
    }
    for index, scale in enumerate(plot.scales):
        color = MUTED if index == last else LINE
        axes.plot([index, index], [-SPREAD, 1 + SPREAD], color=color, linewidth=1.2, zorder=3)
        for place, text in scale.marks:
            axes.text(index - 0.02 * max(1, last) / 3, place, plain_text(one_line(text, 20)), **look)


def blues() -> Any:
    """Return the colour map from weak to strong."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("better", list(BLUES))
