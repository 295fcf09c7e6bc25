"""Balance of expert-parallel hosts: the work that the counted rows meant for each host.

Hosts wait for the slowest one in every layer. So over several layers the imbalance is the sum of the
slowest times over the sum of the mean times: how much longer the experts took than on hosts that are
always equally busy (see ``placements`` for times).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.record.events.kinds import Event, Exchange, Load
from orchestrator.record.experts.placements import (
    RecordedPlacement,
    Rows,
    Wait,
    placement_at,
    placement_spans,
)

Counts = list[dict[int, float]]
"""Tokens by layer and expert id."""


@dataclass(frozen=True)
class SettledLoads:
    """The placement at the end of a run, and the second half of the loads since its placement event.

    The second half shows how the gate settled, not how it began. Each load event comes with the
    placement it was counted under, since single experts may have changed in between.
    """

    placement: RecordedPlacement
    loads: list[tuple[RecordedPlacement, Load]]


def settled_loads(events: Sequence[Event], loads: Iterable[Load]) -> SettledLoads | None:
    """Return the loads under the last placement; None without one."""
    spans = placement_spans(events)
    last = spans[-1][1] if spans else None
    if last is None:
        return None
    counted = [
        (placement, event)
        for event in loads
        if (placement := placement_at(spans, event.step)) is not None
        and placement.placed_step == last.placed_step
    ]
    return SettledLoads(last, counted[len(counted) // 2 :])


def settled_imbalance(events: Sequence[Event], loads: Iterable[Load]) -> float | None:
    """Return the imbalance in summary and report: from the slowest hosts of each step, over the
    settled loads."""
    settled = settled_loads(events, loads)
    if settled is None:
        return None
    waits = [
        wait
        for placement, event in settled.loads
        for wait in placement.layer_waits(placement.times(token_counts(event)))
    ]
    return imbalance(waits)


def imbalance(waits: Iterable[Wait]) -> float | None:
    """Return slowest over mean time, summed over consecutive waits; 1 is balanced, None if there
    was no work."""
    slowest, mean = (sum(column) for column in zip((0.0, 0.0), *waits, strict=True))
    return slowest / mean if mean else None


def token_counts(event: Load) -> Counts:
    """Return the counts of a load event by layer and expert id."""
    counts: Counts = []
    for index, layer in enumerate(event.loads):
        ids = event.ids[index] if index < len(event.ids) else ()
        # Without ids the experts are the initial ones.
        known = ids if len(set(ids)) == len(layer) else range(len(layer))
        counts.append({expert: number or 0.0 for expert, number in zip(known, layer, strict=True)})
    return counts


def even_ratios(counts_of_events: Iterable[Mapping[int, float]]) -> dict[int, float | None]:
    """Return each expert's tokens in a layer, over the events that count it, as a multiple of its even share.

    The even share depends on the number of experts of each event. None if nothing was counted."""
    tokens: dict[int, float] = {}
    even_tokens: dict[int, float] = {}
    for counts in counts_of_events:
        even = sum(counts.values()) / len(counts) if counts else 0.0
        for expert, count in counts.items():
            tokens[expert] = tokens.get(expert, 0.0) + count
            even_tokens[expert] = even_tokens.get(expert, 0.0) + even
    return {
        expert: tokens[expert] / even if even > 0 else None for expert, even in sorted(even_tokens.items())
    }


def num_tokens(rows: Rows) -> float:
    return sum(sum(layer.values()) for layer in rows)


def mean_per_step(exchanges: Iterable[Exchange], name: str) -> float | None:
    """Return the mean of a per-step figure, weighted by each event's steps; None if no event has it."""
    weighted = [
        (value, event.steps or 1.0) for event in exchanges if (value := getattr(event, name)) is not None
    ]
    num_steps = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / num_steps if num_steps else None
