"""Changes of the experts during a run, and their graphs, as ``expert`` and ``expert_graph`` events record
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import effective_events
from orchestrator.record.events.kinds import ChangeKind, Event, ExpertChange, Failure, Load, Recovery, Start
from orchestrator.record.events.sessions import by_step

KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)


def expert_changes(events: Iterable[Event]) -> list[ExpertChange]:
    """Return the changes of a run without those that a restart discarded or repeated, in order.

    A restart at step N restores a state from before or after the changes of step N. If the new processes
    carry out changes at that step, these replace the ones before the restart."""
    relevant = [event for event in events if isinstance(event, ExpertChange | Recovery | Start | Failure)]
    changes_of_step: dict[int, list[ExpertChange]] = {}
    attempt_of_step: dict[int, int] = {}
    attempt = 0
    for event in effective_events(relevant):
        # After these, the workers may repeat the changes of a step.
        attempt += isinstance(event, Start | Failure)
        if not isinstance(event, ExpertChange):
            continue
        if attempt_of_step.get(event.step) != attempt:
            changes_of_step[event.step] = []
            attempt_of_step[event.step] = attempt
        changes_of_step[event.step].append(event)
    return [change for step in sorted(changes_of_step) for change in changes_of_step[step]]


def lasting_changes(changes: Sequence[ExpertChange]) -> list[ExpertChange]:
    """Return the changes that were not undone, without the events that undo."""
    lasting: list[ExpertChange] = []
    for change in changes:
        if change.change != "undone":
            lasting.append(change)
        elif lasting and lasting[-1].is_undone_by(change):
            lasting.pop()
    return lasting


def change_counts(changes: Sequence[ExpertChange]) -> dict[str, int]:
    """Return the number of lasting changes by kind, and the number of undone ones."""
    counts = Counter(change.change for change in lasting_changes(changes))
    counts["undone"] = sum(change.change == "undone" for change in changes)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def final_num_experts(
    changes: Sequence[ExpertChange], loads: Sequence[Load], final_step: int | None = None
) -> list[int]:
    """Return the number of experts of each layer after a step, else at the end.

    They follow from the last loads until then and from later changes."""
    if final_step is not None:
        changes = [change for change in changes if change.step <= final_step]
        loads = [load for load in loads if load.step <= final_step]
    if not loads:
        return []
    numbers = [len(layer) for layer in loads[-1].loads]
    for change in changes:
        is_later = change.step >= loads[-1].step
        if is_later and change.experts is not None and change.layer < len(numbers):
            numbers[change.layer] = change.experts
    return numbers


def expert_graphs(events: Iterable[Event]) -> list[kinds.ExpertGraph]:
    """Return the graphs of a run in order of steps, without those that a restart discarded."""
    relevant = [
        event
        for event in events
        if isinstance(event, kinds.ExpertGraph | kinds.Recovery | kinds.Start | kinds.Failure)
    ]
    return list(map(checked_graph, by_step(effective_events(relevant), kinds.ExpertGraph)))


def checked_graph(graph: kinds.ExpertGraph) -> kinds.ExpertGraph:
    """Return a graph without empty layers, experts that come twice and pairs of unknown ones."""
    return replace(graph, layers=tuple(_checked_layer(layer) for layer in graph.layers if layer.experts))


def _checked_layer(layer: kinds.GraphLayer) -> kinds.GraphLayer:
    by_id = {expert.id: expert for expert in layer.experts}

    def known(pairs: Sequence[kinds.GraphPair]) -> tuple[kinds.GraphPair, ...]:
        return tuple(
            pair for pair in pairs if {pair.first, pair.second} <= by_id.keys() and pair.first != pair.second
        )

    return replace(
        layer,
        experts=tuple(by_id.values()),
        coactivation=known(layer.coactivation),
        similarity=known(layer.similarity),
    )


def recorded_sizes(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Return the sizes that the graphs of a run name, by layer and expert id."""
    layers = [layer for event in events if isinstance(event, kinds.ExpertGraph) for layer in event.layers]
    return {
        (layer.layer, expert.id): expert.size for layer in layers for expert in layer.experts if expert.size
    }


def graph_of_epochs(graphs: Iterable[kinds.ExpertGraph]) -> dict[int, kinds.ExpertGraph]:
    """Return the last graph of each epoch."""
    return {graph.shown_epoch: graph for graph in graphs}
