"""The page's part on where the experts live: what it costs, who holds which, and how evenly the hosts are used."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.run.expert_load import MAX_DOUBLINGS, doublings
from orchestrator.report.run.host_load import (
    HOST_DOUBLINGS,
    UNEVEN,
    ExchangeCost,
    HostLoad,
    LayerLoad,
    exchange_cost,
    held_text,
    host_load,
    ids_text,
    lost_text,
    slowest_text,
    span_text,
)
from orchestrator.report.run.plan_section import table
from orchestrator.report.run.read import RunRecord
from orchestrator.report.run.sections import heading, tile_row, with_unit
from orchestrator.report.run.stats import flops_text, plural
from orchestrator.report.run.svg import esc, heat_image
from orchestrator.types import bytes_text, seconds_text

SEGMENTS_PX, DIGIT_PX = 480, 7
"""Width of a host's experts on a page of full width, and of a digit: narrower segments go without their number."""
ROW_PX = 24
MEASURED = 1e6
"""FLOP/s that any device has."""
MANY_HOSTS = 16
STRONG = 0.6
"""From this strength on a colour asks for light text."""


def living(record: RunRecord) -> str:
    found, sent = host_load(record), exchange_cost(record)
    if found is not None and len(found.hosts) < 2:
        found = None
    if found is None and sent is None:
        return ""
    tiles = tile_row([*_imbalance_tile(found), *_exchange_tiles(sent)])
    return (
        heading("Where the experts live", _aside(found))
        + tiles
        + (_pictures(found) + _hosts_table(found) if found else "")
    )


def _aside(found: HostLoad | None) -> str:
    if found is None:
        return ""
    placed = f", placed by {found.placement.method}" if found.placement.method else ""
    return found.placement.sentence or f"{plural(len(found.hosts), 'host', 'hosts')}{placed}"


def _imbalance_tile(found: HostLoad | None) -> list[tuple[str, str, str]]:
    if found is None or (found.imbalance is None and found.predicted_imbalance is None):
        return []
    predicted = (
        f"predicted {found.predicted_imbalance:.2f}×"
        if found.predicted_imbalance is not None
        else "not predicted"
    )
    if found.imbalance is None:
        return [("imbalance", "–", predicted)]
    return [("imbalance", f"{found.imbalance:.2f}×", f"slowest of each step; {predicted}")]


def _exchange_tiles(sent: ExchangeCost | None) -> list[tuple[str, str, str]]:
    if sent is None:
        return []
    tiles = []
    if sent.bytes is not None:
        rows = f"{sent.rows:,.0f} rows" if sent.rows is not None else "to other hosts"
        tiles.append(("sent per step", with_unit(bytes_text(sent.bytes)), rows))
    if sent.seconds is not None:
        share = f"{sent.share:.0%} of a step" if sent.share is not None else "each step"
        tiles.append(("exchange wait", with_unit(seconds_text(sent.seconds)), share))
    return tiles


def _pictures(found: HostLoad) -> str:
    """A card per layer, or one card for all where there are too many experts to show each."""
    if not found.detailed:
        return f'<div class="grid one">{_map_card(found)}</div>{_map_key(found)}'
    cards = "".join(_layer_card(found, layer) for layer in found.layers)
    return f'<div class="grid one">{cards}</div>{_experts_key(found)}'


def _layer_card(found: HostLoad, layer: LayerLoad) -> str:
    cells = [_segments(layer, host, found.widest) for host in range(len(found.hosts))]
    told = slowest_text(layer.slowest, layer.predicted_imbalance)
    return _card(
        f"Layer {layer.index}", layer.name, told, _rows(found, cells, layer.measured, layer.predicted)
    )


def _card(title: str, beside: str, told: str, body: str) -> str:
    unit = f'<span class="unit">{esc(beside)}</span>' if beside else ""
    keys = f'<span class="keys"><span class="unit">{esc(told)}</span></span>'
    return f'<figure class="card chart"><figcaption>{esc(title)} {unit}{keys}</figcaption>{body}</figure>'


def _segments(layer: LayerLoad, host: int, widest: float) -> str:
    held = layer.placement.experts_by_host[host]
    return (
        "".join(_segment(layer, expert, layer.shares[expert] / widest) for expert in held)
        or "<em>no expert</em>"
    )


def _segment(layer: LayerLoad, expert: int, width: float) -> str:
    use = layer.use[expert]
    strength = doublings(use) / MAX_DOUBLINGS if use is not None else 0.0
    color = (
        f";--to:var(--{'warm' if strength > 0 else 'cold'});--much:{100 * abs(strength):.0f}%"
        if strength
        else ""
    )
    about = f"expert {expert}: {layer.shares[expert]:.1%} of the layer" + (
        f", {use:.2f}× its even share of rows" if use is not None else ""
    )
    strong = ' class="strong"' if abs(strength) > STRONG else ""
    label = str(expert) if width * SEGMENTS_PX > DIGIT_PX * (len(str(expert)) + 0.6) else ""
    return f'<i{strong} style="width:{100 * width:.2f}%{color}" title="{about}">{label}</i>'


def _map_card(found: HostLoad) -> str:
    """A strip per host: its time in each layer."""
    height = ROW_PX if len(found.hosts) <= MANY_HOSTS else ROW_PX - 8
    times = [
        (layer.measured if found.steps else layer.predicted) or [None] * len(found.hosts)
        for layer in found.layers
    ]
    strips = [
        heat_image([[each[host] for each in times]], f"{found.label(host)} by layer", HOST_DOUBLINGS, height)
        for host in range(len(found.hosts))
    ]
    rows = _rows(
        found,
        strips,
        found.measured,
        found.predicted,
        f"layer {found.layers[0].index}",
        f"layer {found.layers[-1].index}",
    )
    told = slowest_text(found.slowest, found.predicted_imbalance, "slowest host of each layer")
    return _card("Hosts by layer", "", told, rows)


def _rows(
    found: HostLoad,
    cells: Sequence[str],
    measured: list[float] | None,
    predicted: list[float] | None,
    *ends: str,
) -> str:
    """A row per host: its name, what it holds, and its time against the mean as measured (thick) and predicted (thin)."""
    longest = max(UNEVEN, found.longest)
    mean = f"--mean:{100 / longest:.2f}%"
    lines = []
    for host, cell in enumerate(cells):
        bars = (
            f'<i{_over(measured[host])} style="width:{100 * measured[host] / longest:.2f}%"></i>'
            if measured
            else ""
        )
        bars += f'<b style="width:{100 * predicted[host] / longest:.2f}%"></b>' if predicted else ""
        time = f"{(measured or predicted or [])[host]:.2f}×" if measured or predicted else "–"
        name = f"<span>{esc(found.label(host))}{f'<small>{found.pace(host)}</small>' if found.pace(host) else ''}</span>"
        lines.append(
            f'{name}<div class="segments">{cell}</div><div class="load" style="{mean}">{bars}</div><span>{time}</span>'
        )
    if ends:
        lines.append(
            f'<span></span><div class="end">{"".join(f"<span>{esc(end)}</span>" for end in ends)}</div><span></span><span></span>'
        )
    return f'<div class="hosts">{"".join(lines)}</div>'


def _over(time: float) -> str:
    return ' class="over"' if time > UNEVEN else ""


def _experts_key(found: HostLoad) -> str:
    scale = (
        '<div class="scale">an expert\'s rows: a quarter of the even share or less<i></i>four times or more</div>'
        if found.steps
        else ""
    )
    return f'{scale}<p class="beside">Experts by number, as wide as their share of the layer\'s size. {_times_key(found)}</p>'


def _map_key(found: HostLoad) -> str:
    told = "as measured" if found.steps else "as predicted"
    scale = f'<div class="scale">time of a host in a layer, {told}: half the mean or less<i></i>twice or more</div>'
    why = "Hosts wait for the slowest in every layer, so that even totals may hide uneven layers."
    return f'{scale}<p class="beside">{_times_key(found)} {why}</p>'


def _times_key(found: HostLoad) -> str:
    measured = (
        f"from the rows of {span_text(found)}, orange above {UNEVEN:g}×; thin: as predicted"
        if found.steps
        else "as predicted"
    )
    lost = f" {lost_text(found)}." if found.unplaced else ""
    return f"Bars: rows × size / speed of a host against the mean host (dashed), {measured}.{lost}"


def _hosts_table(found: HostLoad) -> str:
    body = "".join(_table_row(found, place) for place in range(len(found.hosts)))
    names = ("host", "device", "speed", "experts", "share of the work", "time / mean", "predicted")
    shown = " open" if len(found.hosts) <= MANY_HOSTS else ""
    return f'<details class="card"{shown}><summary>Hosts <small>{len(found.hosts)}</small></summary>{table(names, body)}</details>'


def _table_row(found: HostLoad, place: int) -> str:
    host = found.hosts[place]
    device = esc(" · ".join(part for part in (host.name, host.device) if part)) or "–"
    beside = esc(
        ", ".join(part for part in (host.node, bytes_text(host.memory) if host.memory else "") if part)
    )
    figures = [
        _speed(host.speed),
        _held(found, place),
        f"{found.work[place]:.1%}" if found.work else "–",
        f"{found.measured[place]:.2f}×" if found.measured else "–",
        f"{found.predicted[place]:.2f}×" if found.predicted else "–",
    ]
    cells = "".join(f'<td class="figure">{cell}</td>' for cell in figures)
    return f'<tr><td style="white-space:nowrap">{esc(found.label(place))}</td><td>{device}<div class="not">{beside}</div></td>{cells}</tr>'


def _speed(speed: float | None) -> str:
    """Speeds that nobody measured are relative ones."""
    if not speed:
        return "–"
    return esc(flops_text(speed)) if speed >= MEASURED else f"{speed:g}, relative"


def _held(found: HostLoad, place: int) -> str:
    if not found.detailed:
        return held_text(found, place)
    held = [
        (layer.index, ids_text(layer.placement.experts_by_host[place]) or "none") for layer in found.layers
    ]
    return "".join(f"<div>layer {index}: {ids}</div>" for index, ids in held)
