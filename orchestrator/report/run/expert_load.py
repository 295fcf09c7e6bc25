"""Use of the experts: each expert's share of its layer's tokens, as a multiple of the even share.

The ratio is 1.0 for every expert if all receive the same number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.record.events import Event
from orchestrator.record.host_balance import sum_counts, token_counts
from orchestrator.report.run.read import RunRecord, cached_on_record

MAX_COLUMNS = 120
IDLE_RATIO = 0.05
"""An expert with a lower ratio is idle."""
MAX_LOG2 = 2.0
"""The colours of expert use range from a quarter to four times the even share."""

Counts = list[list[float]]
"""Tokens by layer and expert."""


@dataclass(frozen=True)
class LayerLoad:
    """One layer's experts over time."""

    layer: int
    steps: list[int]
    """Last step of each column."""
    ratios: list[list[float | None]]
    """Ratios by expert and column; None if the expert did not exist or no tokens were counted."""

    @property
    def num_experts(self) -> int:
        return len(self.ratios)

    def recent(self) -> list[float]:
        """Return each expert's mean ratio over the second half: how the gate settled, not how it began."""
        half = len(self.steps) // 2
        known = [[ratio for ratio in row[half:] if ratio is not None] for row in self.ratios]
        return [sum(row) / len(row) for row in known if row]


@cached_on_record
def layer_loads(record: RunRecord) -> list[LayerLoad]:
    """Return all layers with experts; neighbouring events are summed to at most MAX_COLUMNS columns."""
    columns = _columns(record.loads)
    num_layers = max((len(counts) for _, counts in columns), default=0)
    layers = [_layer_load(index, columns) for index in range(num_layers)]
    return [layer for layer in layers if any(ratio is not None for row in layer.ratios for ratio in row)]


def busiest_layer(layers: Sequence[LayerLoad]) -> tuple[int, float] | None:
    """Return the layer with the largest ratio of a single expert, and that ratio."""
    peaks = [(max(recent), layer.layer) for layer in layers if len(recent := layer.recent()) > 1]
    if not peaks:
        return None
    ratio, layer = max(peaks)
    return layer, ratio


def idlest_layer(layers: Sequence[LayerLoad]) -> tuple[int, int, int] | None:
    """Return the layer with the largest part of idle experts, their number, and the number of experts."""
    counts = [
        (sum(ratio < IDLE_RATIO for ratio in recent), len(recent), layer.layer)
        for layer in layers
        if (recent := layer.recent())
    ]
    num_idle, num_experts, layer = max(counts, key=lambda count: count[0] / count[1], default=(0, 0, 0))
    return (layer, num_idle, num_experts) if num_idle else None


def clipped_log2(ratio: float, limit: float = MAX_LOG2) -> float:
    """Return the value that colours show: twice and half the even share are equally far from it."""
    return max(-limit, min(limit, math.log2(ratio))) if ratio > 0 else -limit


def _columns(events: list[Event]) -> list[tuple[int, Counts]]:
    """Return the last step and the counts of each column."""
    width = -(-len(events) // MAX_COLUMNS) or 1
    groups = [events[index : index + width] for index in range(0, len(events), width)]
    return [(group[-1]["step"], sum_counts(token_counts(event) for event in group)) for group in groups]


def _layer_load(index: int, columns: list[tuple[int, Counts]]) -> LayerLoad:
    ratios_by_column = [_ratios(counts[index]) if index < len(counts) else [] for _, counts in columns]
    num_experts = max((len(ratios) for ratios in ratios_by_column), default=0)
    ratios_by_expert = [
        [ratios[expert] if expert < len(ratios) else None for ratios in ratios_by_column]
        for expert in range(num_experts)
    ]
    return LayerLoad(index, [step for step, _ in columns], ratios_by_expert)


def _ratios(counts: list[float]) -> list[float | None]:
    even = sum(counts) / len(counts) if counts else 0.0
    return [count / even if even > 0 else None for count in counts]
