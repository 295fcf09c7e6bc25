"""Recent use of the experts and of their hosts, from the last ``load`` events."""

from __future__ import annotations

from collections import deque

from orchestrator.record.events.kinds import Event, ExpertGraph, Load, Placement, Start
from orchestrator.record.experts.host_balance import even_ratios, imbalance, token_counts
from orchestrator.record.experts.placements import RecordedPlacement, placement_spans

RECENT_LOADS = 10
"""Load events, of ``log_every`` steps each, that the figures are of."""

LayerUse = dict[int, float]
"""Tokens of each expert, by id, as a multiple of the even share."""


class ExpertUse:
    """The last loads, each with the placement that it was counted under."""

    def __init__(self) -> None:
        self._loads: deque[tuple[RecordedPlacement | None, Load]] = deque(maxlen=RECENT_LOADS)
        self._structure: list[Event] = []
        """The newest placement or start, and the changes of experts since then."""
        self._placement: RecordedPlacement | None = None
        self._is_changed = False

    def add_structure(self, event: Event) -> None:
        """Take an event that places or changes experts."""
        if isinstance(event, Start | Placement):
            self._structure = [event]
        # The newest graph has the sizes of all experts; only a run on hosts needs them.
        elif isinstance(event, ExpertGraph):
            kept = [old for old in self._structure if not isinstance(old, ExpertGraph)]
            self._structure = [*kept, event] if self._has_placement() else kept
        elif self._has_placement():
            self._structure.append(event)
        self._is_changed = True

    def add_load(self, event: Load) -> None:
        self._loads.append((self.placement, event))

    def cut(self, step: int) -> None:
        """Forget the loads past a step: they are repeated."""
        kept = [entry for entry in self._loads if entry[1].step <= step]
        self._loads = deque(kept, maxlen=RECENT_LOADS)

    @property
    def placement(self) -> RecordedPlacement | None:
        """The hosts of the experts now; None if the experts have no hosts."""
        if self._is_changed:
            spans = placement_spans(self._structure)
            self._placement = spans[-1][1] if spans else None
            self._is_changed = False
        return self._placement

    def layers(self) -> list[LayerUse]:
        """Return the use of the experts that exist now, by layer."""
        counted = [token_counts(event) for _, event in self._loads]
        layers: list[LayerUse] = []
        for index, now in enumerate(counted[-1] if counted else ()):
            ratios = even_ratios([counts[index] for counts in counted if index < len(counts)])
            layers.append({expert: ratios.get(expert) or 0.0 for expert in now})
        return layers

    def host_times(self) -> list[float] | None:
        """Return the time of each host's experts as a multiple of the mean."""
        placement = self.placement
        if placement is None:
            return None
        totals = [0.0] * len(placement.hosts)
        for under, event in self._loads:
            if under is None or under.hosts != placement.hosts:
                continue
            for times in under.times(token_counts(event)):
                totals = [total + time for total, time in zip(totals, times, strict=True)]
        return placement.relative_times(totals)

    def imbalance(self) -> float | None:
        """Return the time of the slowest host of each layer over the mean time; 1 is balanced."""
        waits = [
            wait
            for under, event in self._loads
            if under is not None
            for wait in under.layer_waits(under.times(token_counts(event)))
        ]
        return imbalance(waits)

    def _has_placement(self) -> bool:
        return bool(self._structure) and isinstance(self._structure[0], Placement)
