"""The page's section on the experts' hosts: the cost of the exchange, the experts of each host,
the balance."""

from __future__ import annotations

from orchestrator.report.draw.html import (
    Tile,
    esc,
    folded,
    header_cells,
    heading,
    table,
    tile_row,
    with_unit,
)
from orchestrator.report.draw.page_plot import color_scale, grid, keys_row
from orchestrator.report.run.figures.host_load import (
    ExchangeCost,
    HostLoad,
    exchange_cost,
    host_load,
    ids_text,
    num_experts_text,
)
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.hosts_plot import MANY_HOSTS, colors_key, host_plots, hosts_keys
from orchestrator.types import bytes_text, counted, flops_text, seconds_text

MIN_FLOPS = 1e6
"""Smaller speeds are relative ones: every device has more FLOP/s."""
WAITING = "Hosts wait for the slowest in every layer, so balanced totals may hide unbalanced layers."


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
    return load.placement.sentence or f"{counted(len(load.hosts), 'host')}{method}"


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
    cards = grid(host_plots(load), " one")
    scale = colors_key(load)
    key = color_scale(scale) if scale is not None else ""
    waiting = "" if load.shows_experts else f'<p class="remark">{WAITING}</p>'
    return f'{cards}<div class="parts graph-key">{keys_row(hosts_keys(load))}</div>{key}{waiting}'


def _hosts_table(load: HostLoad) -> str:
    body = "".join(_table_row(load, host) for host in range(len(load.hosts)))
    head = header_cells("host", "device", "speed", "experts", "share of the work", "time / mean", "predicted")
    is_open = len(load.hosts) <= MANY_HOSTS
    return folded("Hosts", str(len(load.hosts)), table("Hosts", head, body), is_open)


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
