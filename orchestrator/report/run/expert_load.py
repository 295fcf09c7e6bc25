"""How evenly the experts were used, from the load events: the share of a layer's tokens that each expert received,
as a multiple of the even share (1.0 when all experts receive the same)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.record.events import Event
from orchestrator.record.host_balance import sum_counts, token_counts
from orchestrator.report.run.read import RunRecord, remembered

MAX_COLUMNS = 120
IDLE = 0.05
"""An expert that receives less than this part of the even share is idle."""
MAX_DOUBLINGS = 2.0
"""Colours of expert use reach from a quarter to four times the even share."""


@dataclass(frozen=True)
class LayerLoad:
    """One layer's experts over time."""

    layer: int
    steps: list[int]
    """Last step of each column."""
    ratios: list[list[float | None]]
    """[expert][column]; None where the expert did not exist or no tokens were counted."""

    @property
    def experts(self) -> int:
        return len(self.ratios)

    def recent(self) -> list[float]:
        """Each expert's mean ratio over the second half: how the gate settled, not how it began."""
        half = len(self.steps) // 2
        known = [[ratio for ratio in row[half:] if ratio is not None] for row in self.ratios]
        return [sum(row) / len(row) for row in known if row]


@remembered
def layer_loads(record: RunRecord) -> list[LayerLoad]:
    """All layers with experts; neighbouring events are summed so that no layer has more than MAX_COLUMNS columns."""
    columns = _columns(record.loads)
    depth = max((len(layers) for _, layers in columns), default=0)
    layers = [_layer(index, columns) for index in range(depth)]
    return [layer for layer in layers if any(ratio is not None for row in layer.ratios for ratio in row)]


def busiest(layers: Sequence[LayerLoad]) -> tuple[int, float] | None:
    """The layer whose busiest expert is furthest above the even share, and by what factor."""
    peaks = [(max(recent), layer.layer) for layer in layers if len(recent := layer.recent()) > 1]
    return (max(peaks)[1], max(peaks)[0]) if peaks else None


def idlest(layers: Sequence[LayerLoad]) -> tuple[int, int, int] | None:
    """The layer with the largest part of idle experts, how many these are, and of how many."""
    found = [
        (sum(ratio < IDLE for ratio in recent), len(recent), layer.layer)
        for layer in layers
        if (recent := layer.recent())
    ]
    idle, experts, layer = max(found, key=lambda count: count[0] / count[1], default=(0, 0, 0))
    return (layer, idle, experts) if idle else None


def doublings(ratio: float, most: float = MAX_DOUBLINGS) -> float:
    """What colours go by: twice and half the even share are equally far from it."""
    return max(-most, min(most, math.log2(ratio))) if ratio > 0 else -most


Counts = list[list[float]]


def _columns(events: list[Event]) -> list[tuple[int, Counts]]:
    """(last step, counts by layer and expert) per column."""
    width = -(-len(events) // MAX_COLUMNS) or 1
    groups = [events[index : index + width] for index in range(0, len(events), width)]
    return [(group[-1]["step"], sum_counts(token_counts(event) for event in group)) for group in groups]


def _layer(index: int, columns: list[tuple[int, Counts]]) -> LayerLoad:
    rows = [_ratios(layers[index]) if index < len(layers) else [] for _, layers in columns]
    experts = max((len(row) for row in rows), default=0)
    ratios = [[row[expert] if expert < len(row) else None for row in rows] for expert in range(experts)]
    return LayerLoad(index, [step for step, _ in columns], ratios)


def _ratios(rows: list[float]) -> list[float | None]:
    even = sum(rows) / len(rows) if rows else 0.0
    return [count / even if even > 0 else None for count in rows]
