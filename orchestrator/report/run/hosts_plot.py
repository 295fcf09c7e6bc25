"""Drawings of the experts' hosts, for the page and the image file: each expert on its host if they are few,
else a map of hosts and layers. To the right, the time of each host."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.draw.axes import ticks, value_axis
from orchestrator.report.draw.marks import (
    CARD,
    INK,
    LINE,
    MUTED,
    Cells,
    Color,
    Group,
    Hatch,
    Key,
    Mark,
    Path,
    Picture,
    Plot,
    Text,
    Tick,
    area,
    line,
    series_color,
)
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
from orchestrator.report.run.load_plot import ratio_color, ratio_key

WIDTH = 0.6
"""Right end of the experts or the map."""
TIMES_BEGIN = 0.66
TIMES_WIDTH = 0.26
"""Of the bars of times; the times as numbers are to the right of them."""
CHARS = 80
"""About as many characters fit into the width of the experts."""
HOST_PX = 32
MIN_WIDTH_PX = 480
MANY_HOSTS = 16
MANY_HOSTS_PX = 17
"""Height of a host in a map of more hosts than that."""
MAX_NAMES = 64
MAX_LABELLED = 40
"""Number of layers and of hosts up to which a cell of the map is large enough for a number."""
MAX_SHARE = 0.5
"""Share of the colour of a segment at its strongest: the text on it stays readable, light and dark."""
MAP_TICKS = ((0.0, "½× or less"), (0.5, "the mean"), (1.0, "2× or more"))
MEASURED = series_color(0)
SLOW = Color("warm")
PREDICTED = series_color(5, 0.45)


def hosts_picture(record: RunRecord) -> Picture | None:
    load = host_load(record)
    if load is None or len(load.hosts) < 2:
        return None
    title = f"Hosts of the experts of {record.name}"
    return Picture(title, host_plots(load), keys=hosts_keys(load), color_key=colors_key(load))


def host_plots(load: HostLoad) -> list[Plot]:
    """Return a plot for each layer, or one for all if there are too many experts to show each."""
    return [_layer_plot(load, layer) for layer in load.layers] if load.shows_experts else [_map_plot(load)]


def colors_key(load: HostLoad) -> Plot | None:
    """Return the meaning of the colours; None if no expert has one."""
    if not load.shows_experts:
        source = "as measured" if load.steps else "as predicted"
        return ratio_key(
            f"time of a host in a layer, {source}, against the layer's mean", MAP_TICKS, MAX_SHARE
        )
    title = "colour of an expert: its rows, against an even share of the layer's"
    return ratio_key(title, most=MAX_SHARE) if load.steps else None


def hosts_keys(load: HostLoad) -> tuple[Key, ...]:
    keys = []
    if load.steps:
        keys += [Key(f"time measured, {steps_text(load)}", MEASURED), Key(f"over {UNEVEN:g}×", SLOW)]
    if load.predicted is not None:
        keys.append(Key("predicted", PREDICTED))
    keys.append(Key("times: rows × size / speed, against the mean host (dashed)"))
    if load.shows_experts:
        keys.append(Key("numbers: experts, as wide as their share of the layer's size"))
    if load.unplaced:
        keys.append(Key(unplaced_text(load)))
    return tuple(keys)


def _layer_plot(load: HostLoad, layer: HostedLayer) -> Plot:
    marks = [mark for host in range(len(load.hosts)) for mark in _segments(load, layer, host)]
    marks += _times(load, layer.measured, layer.predicted)
    shares = [(WIDTH * mark / load.widest, f"{100 * mark:.3g}%") for mark in ticks(0, load.widest, 6)]
    return Plot(
        f"Layer {layer.index}",
        tuple(marks),
        f"Layer {layer.index}: the experts of each host, and its time against the mean host",
        unit=layer.name,
        remark=slowest_text(layer.slowest, layer.predicted_imbalance),
        x_ticks=(*shares, *_time_ticks(load)),
        y_ticks=_host_ticks(load),
        grid="x",
        height=HOST_PX * len(load.hosts),
        min_width=MIN_WIDTH_PX,
    )


def _segments(load: HostLoad, layer: HostedLayer, host: int) -> list[Mark]:
    """Return the experts of a host, as wide as their share of the layer's size."""
    lower, upper = _row(load, host, -0.36, 0.36)
    middle = (lower + upper) / 2
    marks: list[Mark] = []
    left = 0.0
    for expert in layer.placement.held_by(host):
        share = layer.shares[expert]
        right = left + WIDTH * share / load.widest
        use = layer.use[expert]
        color = LINE if use is None else ratio_color(use, most=MAX_SHARE)
        parts: list[Path | Text] = [area((left, lower, right, upper), color, CARD)]
        if CHARS * share / load.widest > len(str(expert)) + 0.7:
            parts.append(Text(((left + right) / 2, middle), str(expert), room=right - left))
        rows = "" if use is None else f", {use:.2f}× its even share of rows"
        marks.append(Group(tuple(parts), f"expert {expert}: {share:.1%} of the layer{rows}"))
        left = right
    return marks or [Text((0.006, middle), "no expert", "left", MUTED)]


def _row(load: HostLoad, host: int, below: float, above: float) -> tuple[float, float]:
    """Return two heights around the middle of a host's row, given in rows."""
    num_hosts = len(load.hosts)
    middle = num_hosts - host - 0.5
    return ((middle + below) / num_hosts, (middle + above) / num_hosts)


def _times(load: HostLoad, measured: list[float] | None, predicted: list[float] | None) -> list[Mark]:
    """Return each host's time against the mean: a thick bar as measured, a thin one as predicted."""
    marks: list[Mark] = []
    for host in range(len(load.hosts)):
        if measured is not None:
            color = SLOW if measured[host] > UNEVEN else MEASURED
            marks.append(_bar(load, measured[host], _row(load, host, -0.12, 0.34), color))
        if predicted is not None:
            edges = _row(load, host, -0.36, -0.18) if measured else _row(load, host, -0.25, 0.25)
            marks.append(_bar(load, predicted[host], edges, PREDICTED))
        times = measured or predicted
        if times:
            middle, _ = _row(load, host, 0.0, 0.0)
            marks.append(Text((1.0, middle), f"{times[host]:.2f}×", "right"))
    if not marks:
        return [Text((TIMES_BEGIN, 0.5), "the load is unknown", "left", MUTED)]
    mean = _time_place(load, 1.0)
    return [*marks, line((mean, 0.0), (mean, 1.0), stroke=INK, dash=(4.0, 3.0))]


def _bar(load: HostLoad, time: float, edges: tuple[float, float], color: Color) -> Path:
    lower, upper = edges
    return area((TIMES_BEGIN, lower, _time_place(load, time), upper), color)


def _time_place(load: HostLoad, time: float) -> float:
    return TIMES_BEGIN + TIMES_WIDTH * time / max(UNEVEN, load.longest)


def _time_ticks(load: HostLoad) -> list[Tick]:
    axis = value_axis([0.0, max(UNEVEN, load.longest)], from_zero=True)
    return [(_time_place(load, mark), f"{text}×") for mark, text in zip(axis.ticks, axis.labels, strict=True)]


def _host_ticks(load: HostLoad) -> tuple[Tick, ...]:
    shown = range(0, len(load.hosts), -(-len(load.hosts) // MAX_NAMES))
    names = [", ".join(filter(None, (load.label(host), load.relative_speed_text(host)))) for host in shown]
    return tuple((_row(load, host, 0.0, 0.0)[0], name) for host, name in zip(shown, names, strict=True))


def _map_plot(load: HostLoad) -> Plot:
    """Return a cell per host and layer, and next to it the hosts over all layers."""
    num_hosts = len(load.hosts)
    num_layers = len(load.layers)
    is_labelled = num_layers <= MAX_LABELLED and num_hosts <= MAX_LABELLED
    times = [(layer.measured if load.steps else layer.predicted) or [] for layer in load.layers]
    marks = _map_cells(load, times)
    if is_labelled:
        marks += _map_borders(num_hosts, num_layers) + _map_numbers(load)
    marks += _times(load, load.measured, load.predicted)
    columns = [int(mark) for mark in ticks(0, num_layers - 1, 13) if mark == int(mark)]
    shown = [(WIDTH * (column + 0.5) / num_layers, str(column)) for column in columns]
    return Plot(
        "Hosts by layer",
        tuple(marks),
        "Time of each host in each layer, and over all layers, against the mean host",
        unit="columns are layers; numbers are experts held" if is_labelled else "columns are layers",
        remark=slowest_text(load.slowest, load.predicted_imbalance, "slowest host of each layer"),
        x_ticks=(*shown, *_time_ticks(load)),
        y_ticks=_host_ticks(load),
        min_width=MIN_WIDTH_PX,
        height=num_hosts * (HOST_PX if num_hosts <= MANY_HOSTS else MANY_HOSTS_PX),
    )


def _map_cells(load: HostLoad, times: Sequence[Sequence[float]]) -> list[Mark]:
    """Return the cells; hatched where the time is unknown."""
    width = WIDTH / len(times)
    colors = tuple(
        tuple(ratio_color(time[host], HOST_MAX_LOG2, MAX_SHARE) if time else Color("fill") for time in times)
        for host in range(len(load.hosts))
    )
    unknown = [
        Hatch((column * width, 0.0, (column + 1) * width, 1.0))
        for column, time in enumerate(times)
        if not time
    ]
    return [Cells((0.0, 0.0, WIDTH, 1.0), colors), *unknown]


def _map_borders(num_hosts: int, num_layers: int) -> list[Mark]:
    rows = [(0.0, row / num_hosts, WIDTH, row / num_hosts) for row in range(1, num_hosts)]
    columns = [(WIDTH * at / num_layers, 0.0, WIDTH * at / num_layers, 1.0) for at in range(1, num_layers)]
    return [line((x0, y0), (x1, y1), stroke=CARD, width=2.0) for x0, y0, x1, y1 in (*rows, *columns)]


def _map_numbers(load: HostLoad) -> list[Mark]:
    width = WIDTH / len(load.layers)
    return [
        Text(
            ((column + 0.5) * width, _row(load, host, 0.0, 0.0)[0]),
            str(len(layer.placement.held_by(host))),
            room=width,
        )
        for column, layer in enumerate(load.layers)
        for host in range(len(load.hosts))
    ]
