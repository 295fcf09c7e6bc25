"""Use of the experts: each expert's share of its layer's tokens, as a multiple of the even share.

The ratio is 1.0 for every expert if all receive the same number of tokens. Experts may be born and
removed during a run: they are known by their ids, and have no ratio while they do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.record.events.kinds import Load
from orchestrator.record.experts.host_balance import Counts, even_ratios, token_counts
from orchestrator.report.run.figures.read import RunRecord, cached_on_record

MAX_COLUMNS = 120
IDLE_RATIO = 0.05
"""An expert with a lower ratio is idle."""
MAX_LOG2 = 2.0
"""The colours of expert use range from a quarter to four times the even share."""

Column = tuple[int, list[Counts]]
"""The last step of some events, and the counts of each."""


@dataclass(frozen=True)
class LayerLoad:
    """One layer's experts over time."""

    layer: int
    steps: list[int]
    """Last step of each column."""
    ids: list[int]
    """All experts that the layer ever had, in the order of the rows."""
    ratios: list[list[float | None]]
    """Ratios by expert and column; None if the expert did not exist or no tokens were counted."""
    final_ids: frozenset[int]
    """The experts at the end."""
    has_changed: bool
    """Whether experts were born or removed."""

    @property
    def num_experts(self) -> int:
        """The number of experts at the end."""
        return len(self.final_ids)

    def recent(self) -> list[float]:
        """Return the mean ratio over the second half of each expert that exists at the end: how the
        gate settled, not how it began."""
        half = len(self.steps) // 2
        rows = [row for expert, row in zip(self.ids, self.ratios, strict=True) if expert in self.final_ids]
        known = [[ratio for ratio in row[half:] if ratio is not None] for row in rows]
        return [sum(row) / len(row) for row in known if row]


@cached_on_record
def layer_loads(record: RunRecord) -> list[LayerLoad]:
    """Return all layers with experts; neighbouring events are summed to at most MAX_COLUMNS columns."""
    columns = _columns(record.loads)
    num_layers = max((len(counts) for _, events in columns for counts in events), default=0)
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


def _columns(events: list[Load]) -> list[Column]:
    width = -(-len(events) // MAX_COLUMNS) or 1
    groups = [events[index : index + width] for index in range(0, len(events), width)]
    return [(group[-1].step, [token_counts(event) for event in group]) for group in groups]


def _layer_load(index: int, columns: list[Column]) -> LayerLoad:
    counts_by_column = [[counts[index] for counts in events if index < len(counts)] for _, events in columns]
    ratios_by_column = [even_ratios(counts) for counts in counts_by_column]
    ids = sorted({expert for ratios in ratios_by_column for expert in ratios})
    sets_of_ids = [frozenset(counts) for column in counts_by_column for counts in column if counts]
    return LayerLoad(
        layer=index,
        steps=[step for step, _ in columns],
        ids=ids,
        ratios=[[ratios.get(expert) for ratios in ratios_by_column] for expert in ids],
        final_ids=sets_of_ids[-1] if sets_of_ids else frozenset(),
        has_changed=len(set(sets_of_ids)) > 1,
    )
