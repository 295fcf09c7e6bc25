"""The page's section on the experts' hosts: the cost of the exchange, the experts of each host,
the balance."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.draw.markup import esc, header_cells, table
from orchestrator.report.run.figures.expert_load import MAX_LOG2, clipped_log2
from orchestrator.report.run.figures.host_load import (
    HOST_MAX_LOG2,
    UNEVEN,
    ExchangeCost,
    HostedLayer,
    HostLoad,
    exchange_cost,
    host_load,
    ids_text,
    num_experts_text,
    slowest_text,
    steps_text,
    unplaced_text,
)
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.figures.stats import plural
from orchestrator.report.run.sections import Tile, heading, tile_row, with_unit
from orchestrator.report.run.svg import heat_image
from orchestrator.types import bytes_text, flops_text, seconds_text

SEGMENTS_PX = 480
"""Width of a host's experts on a page of full width."""
DIGIT_PX = 7
"""Width of a digit: segments narrower than their number have no label."""
ROW_PX = 24
MIN_FLOPS = 1e6
"""Smaller speeds are relative ones: every device has more FLOP/s."""
MANY_HOSTS = 16
MAX_PERCENT = 50
"""Share of the colour of a segment at its strongest: the text on it stays readable, light and dark."""
"""From this strength on a colour is so dark that it needs light text."""


def hosts_section(record: RunRecord) -> str:
    load = host_load(record)
    if load is not None and len(load.hosts) < 2:
        load = None
    cost = exchange_cost(record)
    if load is None and cost is None:
        return ""
    tiles = tile_row([*_imbalance_tiles(load), *_exchange_tiles(cost)])
    content = _pictures(load) + _hosts_table(load) if load else ""
    return heading("Hosts of the experts", _subtitle(load)) + tiles + content


def _subtitle(load: HostLoad | None) -> str:
    if load is None:
        return ""
    method = f" ({load.placement.method})" if load.placement.method else ""
    return load.placement.sentence or f"{plural(len(load.hosts), 'host', 'hosts')}{method}"


def _imbalance_tiles(load: HostLoad | None) -> list[Tile]:
    if load is None or (load.imbalance is None and load.predicted_imbalance is None):
        return []
    predicted = "not predicted"
    if load.predicted_imbalance is not None:
        predicted = f"predicted {load.predicted_imbalance:.2f}×"
    if load.imbalance is None:
        return [("imbalance", "–", predicted)]
    return [("imbalance", f"{load.imbalance:.2f}×", f"slowest of each step; {predicted}")]


def _exchange_tiles(cost: ExchangeCost | None) -> list[Tile]:
    if cost is None:
        return []
    tiles: list[Tile] = []
    if cost.bytes is not None:
        rows = f"{cost.rows:,.0f} rows" if cost.rows is not None else "to other hosts"
        tiles.append(("sent per step", with_unit(bytes_text(cost.bytes)), rows))
    if cost.seconds is not None:
        share = f"{cost.share:.0%} of a step" if cost.share is not None else "each step"
        tiles.append(("exchange wait", with_unit(seconds_text(cost.seconds)), share))
    return tiles


def _pictures(load: HostLoad) -> str:
    """Return a card per layer, or one card for all if there are too many experts to show each."""
    if not load.shows_experts:
        return f'<div class="grid one">{_map_card(load)}</div>{_map_key(load)}'
    cards = "".join(_layer_card(load, layer) for layer in load.layers)
    return f'<div class="grid one">{cards}</div>{_experts_key(load)}'


def _layer_card(load: HostLoad, layer: HostedLayer) -> str:
    cells = [_segments(layer, host, load.widest) for host in range(len(load.hosts))]
    balance = slowest_text(layer.slowest, layer.predicted_imbalance)
    body = _host_rows(load, cells, layer.measured, layer.predicted)
    return _card(f"Layer {layer.index}", layer.name, balance, body)


def _card(title: str, subtitle: str, balance: str, body: str) -> str:
    unit = f'<span class="unit">{esc(subtitle)}</span>' if subtitle else ""
    keys = f'<span class="keys"><span class="unit">{esc(balance)}</span></span>'
    return f'<figure class="card chart"><figcaption>{esc(title)} {unit}{keys}</figcaption>{body}</figure>'


def _segments(layer: HostedLayer, host: int, widest: float) -> str:
    experts = layer.placement.held_by(host)
    segments = [_segment(layer, expert, layer.shares[expert] / widest) for expert in experts]
    return "".join(segments) or "<em>no expert</em>"


def _segment(layer: HostedLayer, expert: int, width: float) -> str:
    use = layer.use[expert]
    strength = clipped_log2(use) / MAX_LOG2 if use is not None else 0.0
    color = ""
    if strength:
        color = f";--to:var(--{'warm' if strength > 0 else 'cold'});--much:{MAX_PERCENT * abs(strength):.0f}%"
    title = f"expert {expert}: {layer.shares[expert]:.1%} of the layer"
    if use is not None:
        title += f", {use:.2f}× its even share of rows"
    fits = width * SEGMENTS_PX > DIGIT_PX * (len(str(expert)) + 0.6)
    label = str(expert) if fits else ""
    return f'<i style="width:{100 * width:.2f}%{color}" title="{title}">{label}</i>'


def _map_card(load: HostLoad) -> str:
    """Return a strip per host: its time in each layer."""
    height = ROW_PX if len(load.hosts) <= MANY_HOSTS else ROW_PX - 8
    unknown = [None] * len(load.hosts)
    times = [(layer.measured if load.steps else layer.predicted) or unknown for layer in load.layers]
    strips = [
        heat_image([[time[host] for time in times]], f"{load.label(host)} by layer", HOST_MAX_LOG2, height)
        for host in range(len(load.hosts))
    ]
    ends = (f"layer {load.layers[0].index}", f"layer {load.layers[-1].index}")
    rows = _host_rows(load, strips, load.measured, load.predicted, ends)
    balance = slowest_text(load.slowest, load.predicted_imbalance, "slowest host of each layer")
    return _card("Hosts by layer", "", balance, rows)


def _host_rows(
    load: HostLoad,
    cells: Sequence[str],
    measured: list[float] | None,
    predicted: list[float] | None,
    ends: Sequence[str] = (),
) -> str:
    """Return a row per host: its name, its experts, its time against the mean as measured and predicted."""
    rows = [_host_row(load, host, cell, measured, predicted) for host, cell in enumerate(cells)]
    if ends:
        labels = "".join(f"<span>{esc(end)}</span>" for end in ends)
        rows.append(f'<span></span><div class="end">{labels}</div><span></span><span></span>')
    return f'<div class="hosts">{"".join(rows)}</div>'


def _host_row(
    load: HostLoad, host: int, cell: str, measured: list[float] | None, predicted: list[float] | None
) -> str:
    longest = max(UNEVEN, load.longest)
    bars = ""
    if measured:
        over = ' class="over"' if measured[host] > UNEVEN else ""
        bars += f'<i{over} style="width:{100 * measured[host] / longest:.2f}%"></i>'
    if predicted:
        bars += f'<b style="width:{100 * predicted[host] / longest:.2f}%"></b>'
    times = measured or predicted
    time = f"{times[host]:.2f}×" if times else "–"
    speed = load.relative_speed_text(host)
    name = esc(load.label(host)) + (f"<small>{speed}</small>" if speed else "")
    load_bars = f'<div class="load" style="--mean:{100 / longest:.2f}%">{bars}</div>'
    return f'<span>{name}</span><div class="segments">{cell}</div>{load_bars}<span>{time}</span>'


def _experts_key(load: HostLoad) -> str:
    scale = ""
    if load.steps:
        scale = (
            '<div class="scale half">an expert\'s rows: a quarter of the even share or less'
            "<i></i>four times or more</div>"
        )
    widths = "Experts by number, as wide as their share of the layer's size."
    return f'{scale}<p class="remark">{widths} {_times_key(load)}</p>'


def _map_key(load: HostLoad) -> str:
    source = "as measured" if load.steps else "as predicted"
    scale = (
        f'<div class="scale">time of a host in a layer, {source}: half the mean or less'
        "<i></i>twice or more</div>"
    )
    reason = "Hosts wait for the slowest in every layer, so balanced totals may hide unbalanced layers."
    return f'{scale}<p class="remark">{_times_key(load)} {reason}</p>'


def _times_key(load: HostLoad) -> str:
    source = "as predicted"
    if load.steps:
        thin = "; thin: as predicted" if load.predicted else ""
        source = f"from the rows of {steps_text(load)}, orange above {UNEVEN:g}×{thin}"
    unplaced = f" {unplaced_text(load)}." if load.unplaced else ""
    return f"Bars: rows × size / speed of a host against the mean host (dashed), {source}.{unplaced}"


def _hosts_table(load: HostLoad) -> str:
    body = "".join(_table_row(load, host) for host in range(len(load.hosts)))
    head = header_cells("host", "device", "speed", "experts", "share of the work", "time / mean", "predicted")
    state = " open" if len(load.hosts) <= MANY_HOSTS else ""
    summary = f"<summary>Hosts <small>{len(load.hosts)}</small></summary>"
    return f'<details class="card"{state}>{summary}{table("Hosts", head, body)}</details>'


def _table_row(load: HostLoad, index: int) -> str:
    host = load.hosts[index]
    device = esc(" · ".join(part for part in (host.name, host.device) if part)) or "–"
    memory = bytes_text(host.memory) if host.memory else ""
    details = esc(", ".join(part for part in (host.node, memory) if part))
    figures = [
        _speed_text(host.speed),
        _experts_text(load, index),
        f"{load.work[index]:.1%}" if load.work else "–",
        f"{load.measured[index]:.2f}×" if load.measured else "–",
        f"{load.predicted[index]:.2f}×" if load.predicted else "–",
    ]
    cells = "".join(f'<td class="figure">{figure}</td>' for figure in figures)
    name = f'<td style="white-space:nowrap">{esc(load.label(index))}</td>'
    return f'<tr>{name}<td>{device}<div class="not">{details}</div></td>{cells}</tr>'


def _speed_text(speed: float | None) -> str:
    """Return a speed in FLOP/s; a small number is relative to the other hosts."""
    if not speed:
        return "–"
    return esc(f"{flops_text(speed)}/s") if speed >= MIN_FLOPS else f"{speed:g}, relative"


def _experts_text(load: HostLoad, index: int) -> str:
    if not load.shows_experts:
        return num_experts_text(load, index)
    lines = [
        f"<div>layer {layer.index}: {ids_text(layer.placement.held_by(index)) or 'none'}</div>"
        for layer in load.layers
    ]
    return "".join(lines)
