"""Pictures of a sweep: how it scales, the heat map of the two settings that matter most, and parallel coordinates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.record.ledger import SweepRecord
from orchestrator.report.draw.axes import tick_text
from orchestrator.report.draw.mpl import COLORS, INK, LINE, MUTED, dress, new_figure, plain, png
from orchestrator.report.draw.write import write_whole
from orchestrator.report.sweep.facts import in_words, objective_name, one_line, series_label, title
from orchestrator.report.sweep.heatmap import Cell, HeatMap, heat_map
from orchestrator.report.sweep.parallel_coords import SPREAD, Line, Parallel, parallel
from orchestrator.report.sweep.scaling import Series, all_series, interval_of, speed_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SERIES = 6
BEST = "#e8590c"
BLUES = ("#dfe4ef", "#93a8ea", "#3b5bdb", "#1c2f80")
GREY = "#f1f3f5"
DARK = 0.5
"""From this strength on a cell asks for light text."""


def draw_pictures(record: SweepRecord, folder: Path) -> list[Path]:
    """Writes every picture the sweep has data for; one that it has none for any more is taken away."""
    drawn = {
        "scaling.png": scaling_figure(record),
        "heatmap.png": heat_figure(record),
        "parallel_coordinates.png": parallel_figure(record),
    }
    for name in (name for name, figure in drawn.items() if figure is None):
        (folder / name).unlink(missing_ok=True)
    return [write_whole(folder / name, png(figure)) for name, figure in drawn.items() if figure is not None]


def scaling_figure(record: SweepRecord) -> Figure | None:
    shown = shown_series(record)
    if not shown:
        return None
    figure = new_figure(4.3 + 0.19 * -(-len(shown) // 2), f"Scaling of {title(record)}")
    speed, efficiency = figure.subplots(1, 2)
    for place, series in enumerate(shown):
        _draw_series(speed, efficiency, series, COLORS[place % len(COLORS)], _label(series, shown))
    devices = sorted({point.devices for series in shown for point in series.points})
    dress(speed, "Throughput", "samples/s")
    dress(efficiency, "Efficiency", "% of the base, per device")
    efficiency.axhline(100, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)), zorder=1)
    efficiency.set_ylim(0, max(110.0, efficiency.get_ylim()[1]))
    speed.plot([], [], color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)), label="ideal")
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


def shown_series(record: SweepRecord) -> list[Series]:
    """The fastest series, both kinds where there are both."""
    found = sorted(all_series(record), key=lambda series: -series.peak)
    strong, weak = ([series for series in found if series.kind == kind] for kind in ("strong", "weak"))
    half = MOST_SERIES // 2
    kept = [*strong[: max(half, MOST_SERIES - len(weak))], *weak[: max(half, MOST_SERIES - len(strong))]]
    return sorted(kept, key=lambda series: (series.kind, -series.peak))


def _label(series: Series, among: list[Series]) -> str:
    alike = [other for other in among if other.kind == series.kind]
    return plain(one_line(f"{series.kind}: {series_label(series, alike)}", 66))


def _draw_series(speed: Axes, efficiency: Axes, series: Series, color: str, label: str) -> None:
    devices = [point.devices for point in series.points]
    rates = [speed_of(point.row) or 0.0 for point in series.points]
    spans = [rate * (interval_of(point.row) or 0.0) for rate, point in zip(rates, series.points, strict=True)]
    look: dict[str, Any] = {
        "color": color,
        "linestyle": "-" if series.kind == "strong" else (0, (5, 2)),
        "linewidth": 1.7,
        "marker": "o",
        "markersize": 4,
        "capsize": 3,
        "elinewidth": 1.1,
    }
    speed.errorbar(devices, rates, yerr=spans, label=label, **look)
    ideal = [rates[0] * count / devices[0] for count in devices]
    speed.plot(devices, ideal, color=color, alpha=0.55, linewidth=1.1, linestyle=(0, (1, 2)), zorder=1)
    errors = [100 * (point.uncertainty or 0.0) for point in series.points]
    efficiency.errorbar(devices, [100 * point.efficiency for point in series.points], yerr=errors, **look)


def _device_axis(axes: Axes, devices: list[int]) -> None:
    if devices[-1] / devices[0] >= 4:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_ticks(devices, [str(count) for count in devices])
    axes.xaxis.set_ticks([], minor=True)
    axes.set_xlabel("devices", fontsize=8, color=MUTED, loc="right", labelpad=1)


def _speed_axis(axes: Axes, devices: list[int]) -> None:
    """Logarithmic where the devices are, so that the ideal lines are straight and none is pressed to the ground."""
    if devices[-1] / devices[0] >= 4:
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        marks = [
            mark
            for power in range(-3, 12)
            for mark in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
            if low <= mark <= high
        ]
        axes.yaxis.set_ticks(marks, [tick_text(mark) for mark in marks])
        axes.yaxis.set_ticks([], minor=True)
    else:
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(lambda value, _: tick_text(value))


def heat_figure(record: SweepRecord) -> Figure | None:
    found = heat_map(record)
    if found is None:
        return None
    settings = in_words(found.x) + (f" and {in_words(found.y)}" if found.y else "")
    height = 1.15 + 0.46 * len(found.rows) + 0.25 * bool(found.others)
    figure = new_figure(height, f"{objective_name(record).capitalize()} by {settings}")
    axes = figure.subplots()
    dress(
        axes,
        one_line(f"each cell the best over {', '.join(map(in_words, found.others))}", 66)
        if found.others
        else "",
        "",
    )
    for y, line in enumerate(found.cells):
        for x, cell in enumerate(line):
            _draw_cell(axes, x, y, cell, len(found.columns))
    _heat_axes(axes, found)
    return figure


def _draw_cell(axes: Axes, x: int, y: int, cell: Cell, columns: int) -> None:
    from matplotlib.patches import Rectangle

    known = cell.value is not None
    color = blues()(cell.strength) if known else GREY
    hatch = "////" if cell.text and not known else None
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=0 if hatch else 1.5))
    if hatch:
        axes.add_patch(
            Rectangle((x, y), 1, 1, facecolor="none", edgecolor="#dfe3e8", hatch=hatch, linewidth=0)
        )
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor="none", edgecolor="white", linewidth=1.5))
    if known and cell.strength == 1:
        axes.add_patch(
            Rectangle(
                (x + 0.02, y + 0.05), 0.96, 0.9, facecolor="none", edgecolor=BEST, linewidth=2.2, zorder=3
            )
        )
    ink = "white" if known and cell.strength > DARK else INK if known else MUTED
    axes.text(
        x + 0.5,
        y + 0.5,
        cell.text,
        ha="center",
        va="center",
        fontsize=9 if columns <= 9 else 7.5,
        color=ink,
        zorder=4,
    )


def _heat_axes(axes: Axes, found: HeatMap) -> None:
    axes.grid(False)
    axes.set_xlim(0, len(found.columns))
    axes.set_ylim(len(found.rows), 0)
    size = 8.5 if max(map(len, found.columns)) * len(found.columns) <= 110 else 6.5
    axes.xaxis.set_ticks(
        [place + 0.5 for place in range(len(found.columns))],
        [plain(one_line(text, 18)) for text in found.columns],
    )
    axes.yaxis.set_ticks(
        [place + 0.5 for place in range(len(found.rows))], [plain(one_line(text, 24)) for text in found.rows]
    )
    axes.tick_params(axis="x", labelsize=size)
    axes.tick_params(axis="y", labelsize=8.5)
    axes.set_xlabel(plain(in_words(found.x)), fontsize=8.5, color=INK)
    axes.set_ylabel(plain(in_words(found.y)) if found.y else "", fontsize=8.5, color=INK)
    axes.spines["bottom"].set_visible(False)


def parallel_figure(record: SweepRecord) -> Figure | None:
    found = parallel(record)
    if found is None:
        return None
    figure = new_figure(4.6, f"Trials of {title(record)}")
    axes = figure.subplots()
    dress(
        axes,
        f"the darker the {'lower' if found.best_low else 'higher'} its {objective_name(record)}; orange is the best",
        "",
    )
    for line in found.lines[:-1]:
        _draw_line(axes, line, blues()(0.12 + 0.88 * line.strength), min(1.6, 0.7 + 40 / len(found.lines)), 2)
    _draw_line(axes, found.lines[-1], BEST, 3.0, 4)
    _parallel_axes(axes, found)
    return figure


def _draw_line(axes: Axes, line: Line, color: Any, width: float, level: int) -> None:
    """From axis to axis in a bend that leaves each of them level, so that lines through one value can be told apart."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Course

    points, codes = [(0.0, line.places[0])], [Course.MOVETO]
    for at, (here, there) in enumerate(zip(line.places, line.places[1:], strict=False)):
        points += [(at + 0.42, here), (at + 0.58, there), (at + 1.0, there)]
        codes += [Course.CURVE4] * 3
    axes.add_patch(
        PathPatch(
            Course(points, codes),
            facecolor="none",
            edgecolor=color,
            linewidth=width,
            capstyle="round",
            zorder=level,
        )
    )


def _parallel_axes(axes: Axes, found: Parallel) -> None:
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    last = len(found.scales) - 1
    axes.set_xlim(-0.12 * max(1, last) ** 0.5, last + 0.1)
    axes.set_ylim(-0.05, 1.05)
    axes.yaxis.set_ticks([])
    axes.xaxis.set_ticks(range(last + 1), [plain(one_line(scale.name, 22)) for scale in found.scales])
    axes.tick_params(axis="x", labelsize=9, colors=INK)
    for at, scale in enumerate(found.scales):
        axes.plot(
            [at, at], [-SPREAD, 1 + SPREAD], color=MUTED if at == last else LINE, linewidth=1.2, zorder=3
        )
        for place, text in scale.marks:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.82, "pad": 1.0}
            label = plain(one_line(text, 20))
            axes.text(
                at - 0.02 * max(1, last) / 3,
                place,
                label,
                ha="right",
                va="center",
                fontsize=8,
                color=INK,
                bbox=box,
                zorder=5,
            )


def blues() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("better", list(BLUES))
