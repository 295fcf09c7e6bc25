"""Bars of the hosts and the heat map of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.live.watch.lines import EMPTY, FULL, LABEL_WIDTH, MARK, SHADES, Part, label_line
from orchestrator.record.events.kinds import Exchange
from orchestrator.record.experts.placements import RecordedPlacement
from orchestrator.record.live.state import LayerUse, RunState
from orchestrator.types import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from rich.text import Text

SLOW = 1.2
"""A host that takes this many times the mean is coloured."""
_LEVELS = ((0.05, "blue"), (0.5, "cyan"), (1.25, ""), (2.0, "yellow"), (float("inf"), "red"))
"""Upper ends of the shades, as multiples of the even share, and their colours."""
_LEGEND = "  ".join(
    f"{shade} {text}"
    for shade, text in zip(SHADES, ("idle", "below 0.5", "even", "above 1.25", "above 2"), strict=True)
)
_FACTS_WIDTH = 34
_MAX_CELL = 4


def hosts(state: RunState, width: int, max_hosts: int) -> list[Text]:
    """Return a bar for each host, whose length is the time of its experts; empty without hosts."""
    placement = state.experts.placement
    times = state.experts.host_times()
    if placement is None or times is None:
        return []
    slowest = state.experts.imbalance()
    head = "time of each host's experts, 1.00× is the mean"
    note = "" if slowest is None else f"; imbalance {slowest:.2f}×"
    lines = [label_line("hosts", f"{head}{note}")]
    longest = max(*times, 1.0)
    bar_width = max(10, min(60, width - LABEL_WIDTH - _FACTS_WIDTH))
    # With many hosts the slowest are worth the space.
    by_time = sorted(range(len(times)), key=lambda index: -times[index])
    for index in sorted(by_time[:max_hosts]):
        host = placement.hosts[index]
        facts = f" {times[index]:.2f}×  {_held_text(placement, index)}"
        style = "yellow" if times[index] >= SLOW else "green"
        bar = _marked_bar(times[index] / longest, 1.0 / longest, bar_width)
        lines.append(label_line(f"  host {host.rank}", (bar, style), facts))
    if len(times) > max_hosts:
        rest = f"{len(times) - max_hosts} more hosts, at most {times[by_time[max_hosts]]:.2f}×"
        lines.append(label_line("", (rest, "dim")))
    return lines + exchange(state)


def _marked_bar(share: float, mean: float, width: int) -> str:
    """Return a bar with a mark at the mean."""
    full = round(share * width)
    mark = min(width - 1, round(mean * width))
    cells = [FULL] * full + [EMPTY] * (width - full)
    cells[mark] = MARK
    return "".join(cells)


def _held_text(placement: RecordedPlacement, index: int) -> str:
    num_experts = sum(len(layer.held_by(index)) for layer in placement.layers)
    return counted(num_experts, "expert")


def exchange(state: RunState) -> list[Text]:
    """Return the token exchange of a step; empty if there is none."""
    exchanged = state.newest(Exchange)
    if exchanged is None or exchanged.seconds is None:
        return []
    seconds = exchanged.seconds
    speed = state.speed()
    share = f" ({seconds / speed.mean_step_s:.0%} of it)" if speed else ""
    sent = "" if exchanged.bytes is None else f", {bytes_text(exchanged.bytes)} to other hosts"
    return [label_line("exchange", f"{seconds_text(seconds)} of waiting per step{share}{sent}")]


def heat_map(state: RunState, width: int, max_layers: int) -> list[Text]:
    """Return a row of shades for each layer, one for each expert; empty without experts."""
    layers = [(index, use) for index, use in enumerate(state.experts.layers()) if use]
    if not layers:
        return []
    # With many layers the most uneven ones are worth the space.
    by_peak = sorted(layers, key=lambda entry: -max(entry[1].values()))
    shown = sorted(by_peak[:max_layers])
    room = max(8, width - LABEL_WIDTH - _FACTS_WIDTH)
    most = max(len(use) for _, use in shown)
    group = -(-most // room)
    lines = [label_line("experts", "tokens of each expert, 1.00× is the even share")]
    cell_width = max(1, min(_MAX_CELL, room // most))
    for index, use in shown:
        lines.append(label_line(f"  layer {index}", *_cells(use, group, cell_width), _peak_text(use)))
    lines.append(label_line("", (_LEGEND, "dim")))
    if group > 1:
        lines.append(label_line("", (f"each cell is the busiest of {group} experts", "dim")))
    if len(layers) > max_layers:
        rest = f"{len(layers) - max_layers} more layers, more even than these"
        lines.append(label_line("", (rest, "dim")))
    return lines


def _cells(use: LayerUse, group: int, cell_width: int) -> list[Part]:
    ratios = list(use.values())
    groups = [ratios[begin : begin + group] for begin in range(0, len(ratios), group)]
    return [_cell(max(ratios), cell_width) for ratios in groups]


def _cell(ratio: float, width: int) -> Part:
    level = next(index for index, (end, _) in enumerate(_LEVELS) if ratio < end)
    return SHADES[level] * width, _LEVELS[level][1]


def _peak_text(use: LayerUse) -> str:
    busiest = max(use, key=lambda expert: use[expert])
    return f"  {counted(len(use), 'expert')}, busiest {busiest}: {use[busiest]:.2f}×"
